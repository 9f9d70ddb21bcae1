// How a rank gets at the arrays of the other ranks of its node: in an arena that it has mapped too (direct), or by reading
// and writing the other process's memory (process_vm_readv, where the system permits that among all ranks of the node).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fireflyer/arena.hpp"
#include "fireflyer/window.hpp"

namespace ff {

// What the ranks of a node find out about each other when they meet; see `sees`.
struct Neighbour {
  int pid = 0;             // 0: its memory cannot be read, only arenas and slots serve
  int arena_fd = -1;       // -1: it has none
};

class Reach {
 public:
  // `neighbours` of all local ranks; takes the descriptors. `own` is mapped by the caller already.
  Reach(const Window& window, int local, std::shared_ptr<Arena> own, const std::vector<Neighbour>& neighbours);

  Places locate(const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes) const;  // of this rank's arrays
  bool reads(int local, const Places& places) const;   // may this rank read that one's input?
  bool writes(int local, const Places& places) const;
  bool everywhere() const { return foreign_; }         // any memory of any rank can be read and written

  // `bytes` of that rank's input (output) at `offset`: where they lie, or a copy in `scratch`. Null: it cannot be read.
  const char* input(int local, const Places& places, std::uint64_t offset, std::size_t bytes, char* scratch) const;
  char* direct_output(int local, const Places& places, std::uint64_t offset, std::size_t bytes) const;  // null: use `write`
  bool write(int local, const Places& places, std::uint64_t offset, const char* from, std::size_t bytes) const;

 private:
  struct Mapping {
    int pid = 0;
    std::shared_ptr<Arena> arena;
  };
  int local_;
  bool foreign_ = false;
  std::vector<Mapping> ranks_;
};

// A random number of this process and where it lies, by which others prove that it is this process's memory they see.
struct Beacon {
  std::uint64_t pid = 0, address = 0, number = 0;
};

Beacon beacon();                   // also lets the ranks of the node read this process, where Yama asks for that
bool sees(const Beacon& beacon);   // true where this process can read and write that one's memory

}  // namespace ff
