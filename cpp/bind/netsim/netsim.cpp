// Python's view of the flow simulator. Arrays are copied in and out; the GIL is released while rates are solved.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "fireflyer/netsim/fair_rates.hpp"
#include "fireflyer/netsim/flow_run.hpp"
#include "fireflyer/netsim/packet_run.hpp"

namespace nb = nanobind;

namespace {

using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span_of(const nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>& array) {
  return {array.data(), array.size()};
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> array_of(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

template <class Run>
void add_transfers(Run& self, const Doubles& nbytes, const Doubles& delay_s, const Doubles& latency_s, const Integers& flow_starts,
                   const Integers& flow_paths, const Doubles& flow_shares, const Integers& after_starts, const Integers& after) {
  self.add_transfers({span_of(nbytes), span_of(delay_s), span_of(latency_s), span_of(flow_starts), span_of(flow_paths),
                      span_of(flow_shares), span_of(after_starts), span_of(after)});
}

std::vector<double> copied(const Doubles& array) { return {array.data(), array.data() + array.size()}; }

}  // namespace

void bind_netsim(nb::module_& m) {
  nb::class_<ff::FairRates>(m, "FairRates")
      .def("__init__", [](ff::FairRates* self, const Doubles& capacities) { new (self) ff::FairRates(copied(capacities)); }, nb::arg("capacities"))
      .def("add_path", [](ff::FairRates& self, const Numbers& links, const Doubles& shares, double weight) { return self.add_path(span_of(links), span_of(shares), weight); }, nb::arg("links"), nb::arg("shares"), nb::arg("weight") = 1.0)
      .def("set_flows", &ff::FairRates::set_flows, nb::arg("path"), nb::arg("flows"))
      .def("set_capacity", &ff::FairRates::set_capacity, nb::arg("link"), nb::arg("capacity"))
      .def("solve", [](ff::FairRates& self) {
        nb::gil_scoped_release released;
        return self.solve(); })
      .def("rates", [](const ff::FairRates& self) {
        std::vector<double> rates(self.paths());
        for (std::uint32_t path = 0; path < self.paths(); ++path) rates[path] = self.rate(path);
        return array_of(std::move(rates)); });

  nb::class_<ff::FlowRun>(m, "FlowRun")
      .def("__init__", [](ff::FlowRun* self, const Doubles& capacities) { new (self) ff::FlowRun(copied(capacities)); }, nb::arg("capacities"))
      .def("add_path", [](ff::FlowRun& self, const Numbers& links, const Doubles& shares, double weight) { return self.add_path(span_of(links), span_of(shares), weight); }, nb::arg("links"), nb::arg("shares"), nb::arg("weight") = 1.0)
      .def("add_transfers", &add_transfers<ff::FlowRun>, nb::arg("nbytes"), nb::arg("delay_s"), nb::arg("latency_s"), nb::arg("flow_starts"), nb::arg("flow_paths"), nb::arg("flow_shares"), nb::arg("after_starts"), nb::arg("after"))
      .def("run_until", &ff::FlowRun::run_until, nb::arg("time_s"), nb::call_guard<nb::gil_scoped_release>())
      .def("set_route", &ff::FlowRun::set_route, nb::arg("flow"), nb::arg("path"))
      .def("set_capacity", &ff::FlowRun::set_capacity, nb::arg("link"), nb::arg("capacity"))
      .def("pending_flows", [](const ff::FlowRun& self) { return array_of(self.pending_flows()); })
      .def_prop_ro("start_s", [](const ff::FlowRun& self) { return array_of(std::vector<double>(self.start_s())); }, nb::rv_policy::move)
      .def_prop_ro("finish_s", [](const ff::FlowRun& self) { return array_of(std::vector<double>(self.finish_s())); }, nb::rv_policy::move)
      .def_prop_ro("path_bytes", [](const ff::FlowRun& self) { return array_of(self.path_bytes()); }, nb::rv_policy::move)
      .def_prop_ro("events", &ff::FlowRun::events);

  nb::class_<ff::PacketRun>(m, "PacketRun")
      .def(
          "__init__",
          [](ff::PacketRun* self, const Doubles& capacities, const Integers& from, const Integers& to, std::uint32_t nodes, std::uint32_t packet_bytes,
             std::uint32_t buffer_bytes, std::uint32_t window, double hop_s, std::vector<double> lane_weights) {
            new (self) ff::PacketRun(copied(capacities), span_of(from), span_of(to), {nodes, packet_bytes, buffer_bytes, window, hop_s, std::move(lane_weights)});
          },
          nb::arg("capacities"), nb::arg("link_from"), nb::arg("link_to"), nb::kw_only(), nb::arg("nodes"), nb::arg("packet_bytes"),
          nb::arg("buffer_bytes"), nb::arg("window"), nb::arg("hop_s"), nb::arg("lane_weights"))
      .def(
          "add_path", [](ff::PacketRun& self, const Numbers& links, std::uint32_t lane) { return self.add_path(span_of(links), lane); },
          nb::arg("links"), nb::arg("lane") = 0)
      .def("add_transfers", &add_transfers<ff::PacketRun>, nb::arg("nbytes"), nb::arg("delay_s"), nb::arg("latency_s"), nb::arg("flow_starts"),
           nb::arg("flow_paths"), nb::arg("flow_shares"), nb::arg("after_starts"), nb::arg("after"))
      .def("run", &ff::PacketRun::run, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("start_s", [](const ff::PacketRun& self) { return array_of(std::vector<double>(self.start_s())); }, nb::rv_policy::move)
      .def_prop_ro("finish_s", [](const ff::PacketRun& self) { return array_of(std::vector<double>(self.finish_s())); }, nb::rv_policy::move)
      .def_prop_ro("blocked_s", [](const ff::PacketRun& self) { return array_of(std::vector<double>(self.blocked_s())); }, nb::rv_policy::move)
      .def_prop_ro("events", &ff::PacketRun::events);
}
