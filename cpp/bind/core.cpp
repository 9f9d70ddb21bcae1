// The one extension module. Each subject binds itself in a file of its own.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_kernels(nb::module_& m);
void bind_collectives(nb::module_& m);

NB_MODULE(_core, m) {
  m.doc() = "Native core of Fire-Flyer: reduction kernels, checksums and the collective executor.";
  bind_kernels(m);
  bind_collectives(m);
}
