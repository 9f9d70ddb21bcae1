// The one extension module. Each component binds itself in a folder of its own.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_codes(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_executor(nb::module_& m);
void bind_recorder(nb::module_& m);
void bind_exchange(nb::module_& m);
void bind_ranges(nb::module_& m);
void bind_tensors(nb::module_& m);
void bind_placement(nb::module_& m);
void bind_netsim(nb::module_& m);
void bind_storage_node(nb::module_& m);
void bind_storage_ring(nb::module_& m);

NB_MODULE(_core, m) {
  // A training script may freeze the garbage collector (it saves seconds at the end of a rank); what it then leaves to the
  // end of the process is no leak, and a page of warnings in a rank's log hides what matters there.
  nb::set_leak_warnings(false);
  m.doc() = "Native core of Fire-Flyer: reduction kernels, checksums, the collective executor, the chunk store's data paths, and the flow simulator.";
  bind_codes(m);
  bind_kernels(m);
  bind_rows(m);
  bind_executor(m);
  bind_recorder(m);
  bind_exchange(m);
  bind_ranges(m);
  bind_tensors(m);
  bind_placement(m);
  bind_netsim(m);
  bind_storage_node(m);
  bind_storage_ring(m);
}
