// Memory of one rank that the other ranks of its node have mapped too: arrays allocated here are reduced where they lie.
//
// One anonymous memory file for each rank, of a fixed size of which only touched pages exist. It is private to the user,
// has no name, and goes with the last process that holds it. Where the system gives transparent huge pages to shared
// memory, it is asked for them.
//
// A child made by fork has no mapping of it, only copies of the objects: there these give nothing back, as the addresses
// may be those of something else by then.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace ff {

inline constexpr std::size_t arena_align = 4096;  // also keeps arrays of different owners on pages of their own

class Arena {
 public:
  static int create(std::size_t bytes);  // a descriptor; throws std::system_error
  // Maps it, or gives back the mapping of the same arena that this process has by an earlier call: the ranks of a node may
  // have many groups, and address space for one arena of each only.
  static std::shared_ptr<Arena> shared(int fd);
  explicit Arena(int fd);                // maps it; does not keep the descriptor. Throws.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  std::string prefer_node(int node);     // for what nobody has touched yet; empty, or why not
  bool holds(const void* address, std::size_t bytes) const;
  char* at(std::uint64_t start, std::uint64_t offset, std::size_t bytes) const;  // null where these are not all inside

  char* allocate(std::size_t bytes);  // zeroed, aligned; throws std::bad_alloc when there is no room in one piece, std::runtime_error in a forked child
  void release(char* address);        // its pages go back to the system
  std::size_t used() const;

 private:
  bool mapped_here() const;           // no: this process is a child of the one that mapped it

  pid_t maker_;
  char* base_ = nullptr;
  std::size_t bytes_ = 0;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;   // offset -> bytes
  std::map<std::size_t, std::size_t> taken_;
};

}  // namespace ff
