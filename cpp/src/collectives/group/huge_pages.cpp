#include "fireflyer/collectives/group/huge_pages.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace ff {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

// The collapse does not ask for this setting, so it is asked for here: "never" is meant.
bool allowed() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  return std::getline(file, line) && line.find("[never]") == std::string::npos;
}

}  // namespace

HugePages::HugePages() : available_(allowed()) {}

void HugePages::seen(const void* address, std::size_t bytes) {
  if (!available_ || bytes < least_bytes) return;
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  auto known = std::find_if(arrays_.begin(), arrays_.end(), [&](const Array& array) { return array.address == at && array.bytes == bytes; });
  if (known == arrays_.end()) {
    arrays_[next_++ % arrays_.size()] = {at, bytes, 0, 1};
    return;
  }
  if (++known->times % again_after == 0) known->gathered = 0;
  gather(*known);
}

void HugePages::gather(Array& array) {
  const std::uintptr_t first = (array.address + huge_page - 1) / huge_page * huge_page, end = (array.address + array.bytes) / huge_page * huge_page;
  const std::uintptr_t from = first + array.gathered;
  if (from >= end) return;
  const std::size_t bytes = std::min<std::size_t>(end - from, bytes_a_time);
  const int error = errno;
  if (madvise(reinterpret_cast<void*>(from), bytes, MADV_COLLAPSE) != 0 && errno == EINVAL && array.gathered == 0 && array.times == 2) {
    // An older kernel, memory of a kind that has none, or pages that nobody has touched: they may be there another time.
    array.gathered = end - first;
  } else {
    array.gathered += bytes;  // what had no room for huge pages now stays as it is
  }
  errno = error;
}

}  // namespace ff
