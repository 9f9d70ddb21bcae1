// How a rank gets at the arrays of the other ranks of its node: in an arena that it has mapped too (direct), or by reading
// and writing the other process's memory (process_vm_readv, where the system permits that among all ranks of the node).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fireflyer/collectives/group/arena.hpp"
#include "fireflyer/collectives/group/group.hpp"
#include "fireflyer/collectives/group/peer_memory.hpp"
#include "fireflyer/collectives/group/window.hpp"

namespace ff {

// What the ranks of a node find out about each other when they meet; see `can_access`.
struct LocalPeer {
  MemoryProbe probe;   // pid 0: its memory cannot be read, only arenas and slots serve
  int arena_fd = -1;   // -1: it has none
};

bool all_open(const std::vector<LocalPeer>& local_peers);  // any of them can read and write any other's memory

class PeerAccess {
 public:
  // `local_peers` of all local ranks; takes no descriptor. `own` is mapped by the caller already.
  PeerAccess(const Window& window, int local, std::shared_ptr<Arena> own, const std::vector<LocalPeer>& local_peers);

  Places locate(const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes) const;  // of this rank's arrays
  // Of all ranks in an operation; this rank's own are `mine`, whatever the window says by now.
  std::vector<Places> places(const OpDescriptor& op, const Places& mine) const;
  bool everywhere() const { return foreign_; }         // any memory of any rank can be read and written

  // `bytes` of that rank's input (output) at `offset`: where they lie, or a copy in `scratch`. Null: errno says why; see `lost`.
  const char* input(int local, const Places& places, std::uint64_t offset, std::size_t bytes, char* scratch) const;
  char* direct_output(int local, const Places& places, std::uint64_t offset, std::size_t bytes) const;  // null: use `write`
  bool write(int local, const Places& places, std::uint64_t offset, const char* from, std::size_t bytes) const;  // false: errno

  // What it means for the operation that this rank could not get at an array of that one.
  Failure lost(const Group& group, int local, const OpDescriptor& op, int error) const;
  // After memory was read: a rank whose process has ended, so that somebody else's may have been read. Null: none has.
  std::optional<Failure> betrayed(const Group& group, const OpDescriptor& op) const;

 private:
  struct Mapping {
    pid_t pid = 0;
    std::shared_ptr<const Process> process;  // none for this one
    std::shared_ptr<Arena> arena;
  };
  const Window& window_;
  int local_;
  bool foreign_ = false;
  std::vector<Mapping> ranks_;
};

}  // namespace ff
