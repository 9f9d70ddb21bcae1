// Many ranges of memory in one call. Arrays of sizes and addresses are checked here, and the GIL is released around the
// work. Addresses are the caller's word: memory that is as large as he says, and stays.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "collectives/buffer.hpp"
#include "fireflyer/base/ranges.hpp"

namespace nb = nanobind;

namespace {

template <class Element>
class Array {
 public:
  Array(nb::handle object, const std::string& name, std::size_t count, bool writable = false) : buffer_(object, name, writable) {
    if (buffer_.size() != count * sizeof(Element))
      throw nb::value_error((name + " holds " + std::to_string(buffer_.size()) + " bytes, not " + std::to_string(sizeof(Element)) + " for each of " +
                             std::to_string(count) + " ranges")
                                .c_str());
  }
  Element* data() const { return static_cast<Element*>(buffer_.data()); }

 private:
  Buffer buffer_;
};

std::size_t count_of(nb::handle sizes) { return Buffer(sizes, "sizes", false).size() / sizeof(std::uint64_t); }

void copy(nb::handle targets, nb::handle sources, nb::handle sizes, int threads) {
  const std::size_t n = count_of(sizes);
  const Array<std::uint64_t> lengths(sizes, "sizes", n);
  const Array<void*> to(targets, "targets", n);
  const Array<const void*> from(sources, "sources", n);
  nb::gil_scoped_release released;
  ff::copy_ranges(to.data(), from.data(), lengths.data(), n, threads);
}

void checksum(nb::handle sums, nb::handle data, nb::handle begins, nb::handle sizes, nb::object targets) {
  const std::size_t n = count_of(sizes);
  const Array<std::uint32_t> crcs(sums, "sums", n, true);
  const Buffer bytes(data, "data", false);
  const Array<std::uint64_t> starts(begins, "begins", n), lengths(sizes, "sizes", n);
  for (std::size_t i = 0; i < n; ++i)
    if (starts.data()[i] > bytes.size() || lengths.data()[i] > bytes.size() - starts.data()[i])
      throw nb::value_error(("range " + std::to_string(i) + " is not within data").c_str());
  const auto* from = static_cast<const std::uint8_t*>(bytes.data());
  if (targets.is_none()) {
    nb::gil_scoped_release released;
    return ff::crc32c_ranges(crcs.data(), from, starts.data(), lengths.data(), nullptr, n);
  }
  const Array<void*> to(targets, "targets", n);
  nb::gil_scoped_release released;
  ff::crc32c_ranges(crcs.data(), from, starts.data(), lengths.data(), to.data(), n);
}

}  // namespace

void bind_ranges(nb::module_& m) {
  m.def("copy_ranges", copy, nb::arg("targets"), nb::arg("sources"), nb::arg("sizes"), nb::arg("threads") = 1);
  m.def("crc32c_ranges", checksum, nb::arg("sums"), nb::arg("data"), nb::arg("begins"), nb::arg("sizes"), nb::arg("targets").none() = nb::none());
}
