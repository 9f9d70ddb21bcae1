// Where memory lies. What the system refuses is said in words, as in placement.hpp.
#include "fireflyer/base/placement.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "collectives/buffer.hpp"

namespace nb = nanobind;

namespace {

std::string prefer(nb::handle memory, int node) {
  const Buffer buffer(memory, "memory", true);
  return ff::prefer_node(buffer.data(), buffer.size(), node);
}

std::pair<std::vector<int>, std::string> nodes_of(nb::handle memory, int pages) {
  const Buffer buffer(memory, "memory", false);
  std::vector<int> nodes(static_cast<std::size_t>(pages > 0 ? pages : 0));
  std::string refused = ff::page_nodes(buffer.data(), buffer.size(), nodes);
  if (!refused.empty()) nodes.clear();
  return {std::move(nodes), std::move(refused)};
}

}  // namespace

void bind_placement(nb::module_& m) {
  m.def("prefer_node", prefer, nb::arg("memory"), nb::arg("node"));
  m.def("page_nodes", nodes_of, nb::arg("memory"), nb::arg("pages"));
}
