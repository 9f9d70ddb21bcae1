// An array that comes back lies in huge pages from then on, as far as the system gives them; its content stays.
#include "fireflyer/collectives/group/huge_pages.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "check.hpp"

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

// Bytes of huge pages in the mapping that holds `address`.
std::size_t huge_bytes(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(maps, line)) {
    unsigned long from = 0, to = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) inside = from <= reinterpret_cast<unsigned long>(address) && reinterpret_cast<unsigned long>(address) < to;
    if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1) return kib * 1024;
  }
  return 0;
}

struct Memory {
  std::size_t bytes;
  char* base;
  explicit Memory(std::size_t size) : bytes(size), base(static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    CHECK(base != MAP_FAILED);
    for (std::size_t i = 0; i < size; i += 4096) base[i] = static_cast<char>(i / 4096);
  }
  ~Memory() { munmap(base, bytes); }
};

bool system_gives() {
  const Memory memory(8 * mib);
  return madvise(reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(memory.base) + 2 * mib - 1) / (2 * mib) * (2 * mib)), 4 * mib, 25) == 0;
}

void arrays_that_come_back() {
  ff::HugePages pages;
  const Memory memory(73 * mib);
  char* const array = memory.base + 12345;
  const std::size_t bytes = 72 * mib;
  const std::size_t before = huge_bytes(array);
  pages.seen(array, bytes);
  CHECK(huge_bytes(array) == before);  // once is not a habit
  pages.seen(array, bytes);
  const bool expected = pages.available() && system_gives();
  std::printf("huge pages: %s\n", expected ? "given" : "not given by this system");
  CHECK(!expected || (huge_bytes(array) >= ff::HugePages::bytes_a_time && huge_bytes(array) < 2 * ff::HugePages::bytes_a_time));
  for (int i = 0; i < 2; ++i) pages.seen(array, bytes);  // a part each time
  CHECK(!expected || huge_bytes(array) >= 68 * mib);
  for (std::size_t i = 0; i < memory.bytes; i += 4096) CHECK(memory.base[i] == static_cast<char>(i / 4096));
}

void what_is_small_or_gone_or_forbidden_is_left_alone() {
  ff::HugePages pages;
  const Memory memory(32 * mib);
  for (int i = 0; i < 3; ++i) pages.seen(memory.base, ff::HugePages::least_bytes - 1);
  CHECK(huge_bytes(memory.base) == 0);
  CHECK(madvise(memory.base, memory.bytes, MADV_NOHUGEPAGE) == 0);
  for (int i = 0; i < 3; ++i) pages.seen(memory.base, memory.bytes);
  CHECK(huge_bytes(memory.base) == 0);
  for (int i = 0; i < 3; ++i) pages.seen(nullptr, memory.bytes);  // not mapped: refused by the kernel, harmless
}

}  // namespace

int main() {
  arrays_that_come_back();
  what_is_small_or_gone_or_forbidden_is_left_alone();
}
