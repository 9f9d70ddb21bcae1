// Huge pages for arrays that come back. The kernel reaches another process's memory page by page; in pages of 2 MiB instead
// of 4 KiB that costs about half the processor time. NumPy asks for them when it allocates, PyTorch and malloc do not, and
// where the system gives them on request only ("madvise", the default of Debian and Ubuntu) their arrays have none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ff {

// Of one rank's private arrays. An array that is seen for the second time is gathered into huge pages, a part with each
// operation. Content and addresses stay. Nothing is done where the administrator or the program has switched them off.
class HugePages {
 public:
  static constexpr std::size_t least_bytes = std::size_t{4} << 20;
  static constexpr std::size_t bytes_a_time = std::size_t{32} << 20;  // about 1 ms for each 2 MiB

  HugePages();
  void seen(const void* address, std::size_t bytes);
  bool available() const { return available_; }

 private:
  struct Array {
    std::uintptr_t address = 0;
    std::size_t bytes = 0, gathered = 0;
    std::uint32_t times = 0;
  };
  static constexpr std::uint32_t again_after = 1024;  // by then the memory may be another's with the same address

  void gather(Array& array);

  bool available_;
  std::array<Array, 64> arrays_;
  std::size_t next_ = 0;
};

}  // namespace ff
