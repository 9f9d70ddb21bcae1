#include "fireflyer/reach.hpp"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <stdexcept>

namespace ff {
namespace {

// Written by others when they look whether they may: [0] holds the number, [1] is theirs to write.
std::array<std::uint64_t, 2> beacon_words{};

bool move_bytes(int pid, void* mine, std::uint64_t theirs, std::size_t bytes, bool into_them) {
  std::size_t done = 0;
  while (done < bytes) {
    iovec local{static_cast<char*>(mine) + done, bytes - done};
    iovec remote{reinterpret_cast<void*>(theirs + done), bytes - done};  // NOLINT: an address of another process
    const ssize_t moved = into_them ? process_vm_writev(pid, &local, 1, &remote, 1, 0) : process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (moved <= 0) return false;
    done += static_cast<std::size_t>(moved);
  }
  return true;
}

}  // namespace

Beacon beacon() {
#ifdef PR_SET_PTRACER
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // fails where there is no Yama: then it is not needed
#endif
  static const std::uint64_t number = [] {
    std::uint64_t random = 0;
    if (getentropy(&random, sizeof random) != 0) throw std::runtime_error("the system gives no random numbers");
    return random;
  }();
  beacon_words[0] = number;
  return Beacon{static_cast<std::uint64_t>(getpid()), reinterpret_cast<std::uint64_t>(beacon_words.data()), number};
}

bool sees(const Beacon& of) {
  std::uint64_t found = 0;
  const int pid = static_cast<int>(of.pid);
  return move_bytes(pid, &found, of.address, sizeof found, false) && found == of.number && move_bytes(pid, &found, of.address + sizeof found, sizeof found, true);
}

Reach::Reach(const Window& window, int local, std::shared_ptr<Arena> own, const std::vector<Neighbour>& neighbours) : local_(local) {
  ranks_.resize(static_cast<std::size_t>(window.ranks()));
  foreign_ = !neighbours.empty();
  for (std::size_t r = 0; r < neighbours.size() && r < ranks_.size(); ++r) {
    ranks_[r].pid = neighbours[r].pid;
    foreign_ = foreign_ && neighbours[r].pid != 0;
    if (static_cast<int>(r) == local) ranks_[r].arena = own;
    else if (neighbours[r].arena_fd >= 0) ranks_[r].arena = std::make_shared<Arena>(neighbours[r].arena_fd);
  }
}

Places Reach::locate(const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes) const {
  Places places;
  places.in = reinterpret_cast<std::uint64_t>(in);
  places.out = reinterpret_cast<std::uint64_t>(out);
  const auto& own = ranks_[static_cast<std::size_t>(local_)].arena;
  if (own && own->holds(in, in_bytes)) places.in_arena = static_cast<std::uint64_t>(static_cast<const char*>(in) - own->base());
  if (own && own->holds(out, out_bytes)) places.out_arena = static_cast<std::uint64_t>(static_cast<const char*>(out) - own->base());
  return places;
}

bool Reach::reads(int local, const Places& places) const { return local == local_ || foreign_ || places.in_arena != never; }

bool Reach::writes(int local, const Places& places) const { return local == local_ || foreign_ || places.out_arena != never; }

const char* Reach::input(int local, const Places& places, std::uint64_t offset, std::size_t bytes, char* scratch) const {
  if (local == local_) return reinterpret_cast<const char*>(places.in + offset);
  const Mapping& rank = ranks_[static_cast<std::size_t>(local)];
  if (places.in_arena != never && rank.arena) {
    const char* at = rank.arena->base() + places.in_arena + offset;
    return rank.arena->holds(at, bytes) ? at : nullptr;
  }
  if (!foreign_) return nullptr;
  return move_bytes(rank.pid, scratch, places.in + offset, bytes, false) ? scratch : nullptr;
}

char* Reach::direct_output(int local, const Places& places, std::uint64_t offset, std::size_t bytes) const {
  if (local == local_) return reinterpret_cast<char*>(places.out + offset);
  const Mapping& rank = ranks_[static_cast<std::size_t>(local)];
  if (places.out_arena == never || !rank.arena) return nullptr;
  char* at = rank.arena->base() + places.out_arena + offset;
  return rank.arena->holds(at, bytes) ? at : nullptr;
}

bool Reach::write(int local, const Places& places, std::uint64_t offset, const char* from, std::size_t bytes) const {
  const Mapping& rank = ranks_[static_cast<std::size_t>(local)];
  return foreign_ && move_bytes(rank.pid, const_cast<char*>(from), places.out + offset, bytes, true);
}

}  // namespace ff
