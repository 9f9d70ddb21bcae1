#include "fireflyer/collectives/group/peer_access.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace ff {
namespace {

constexpr pid_t no_process = -1;  // whose memory is never found

}  // namespace

bool all_open(const std::vector<LocalPeer>& local_peers) {
  return !local_peers.empty() && std::all_of(local_peers.begin(), local_peers.end(), [](const LocalPeer& one) { return one.probe.pid != 0; });
}

PeerAccess::PeerAccess(const Window& window, int local, std::shared_ptr<Arena> own, const std::vector<LocalPeer>& local_peers)
    : window_(window), local_(local), foreign_(all_open(local_peers)) {
  ranks_.resize(static_cast<std::size_t>(window.ranks()));
  for (std::size_t r = 0; r < local_peers.size() && r < ranks_.size(); ++r) {
    Mapping& rank = ranks_[r];
    const LocalPeer& peer = local_peers[r];
    if (foreign_ && peer.probe.pid != static_cast<std::uint64_t>(getpid())) {
      rank.pid = static_cast<pid_t>(peer.probe.pid);
      rank.process = Process::met(rank.pid);
      if (!can_access(peer.probe)) rank.pid = no_process;  // it has ended, or closed its communicator: the descriptor may be another's
    } else {
      rank.pid = getpid();
    }
    if (static_cast<int>(r) == local) rank.arena = own;
    else if (peer.arena_fd >= 0) rank.arena = Arena::shared(peer.arena_fd);
  }
}

Places PeerAccess::locate(const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes) const {
  Places places;
  places.in = reinterpret_cast<std::uint64_t>(in);
  places.out = reinterpret_cast<std::uint64_t>(out);
  const auto& own = ranks_[static_cast<std::size_t>(local_)].arena;
  if (own && own->holds(in, in_bytes)) places.in_arena = static_cast<std::uint64_t>(static_cast<const char*>(in) - own->base());
  if (own && own->holds(out, out_bytes)) places.out_arena = static_cast<std::uint64_t>(static_cast<const char*>(out) - own->base());
  return places;
}

std::vector<Places> PeerAccess::places(const OpDescriptor& op, const Places& mine) const {
  std::vector<Places> all;
  for (int r = 0; r < window_.ranks(); ++r) all.push_back(r == local_ ? mine : window_.places(r, op.seq));
  return all;
}

const char* PeerAccess::input(int local, const Places& places, std::uint64_t offset, std::size_t bytes, char* scratch) const {
  if (local == local_) return reinterpret_cast<const char*>(places.in + offset);
  const Mapping& rank = ranks_[static_cast<std::size_t>(local)];
  errno = ERANGE;
  if (places.in_arena != never && rank.arena) return rank.arena->at(places.in_arena, offset, bytes);
  if (!foreign_ || scratch == nullptr) return nullptr;
  errno = read_memory(rank.pid, scratch, places.in + offset, bytes);
  return errno == 0 ? scratch : nullptr;
}

char* PeerAccess::direct_output(int local, const Places& places, std::uint64_t offset, std::size_t bytes) const {
  if (local == local_) return reinterpret_cast<char*>(places.out + offset);
  const Mapping& rank = ranks_[static_cast<std::size_t>(local)];
  if (places.out_arena == never || !rank.arena) return nullptr;
  return rank.arena->at(places.out_arena, offset, bytes);
}

bool PeerAccess::write(int local, const Places& places, std::uint64_t offset, const char* from, std::size_t bytes) const {
  errno = ERANGE;
  if (!foreign_ || places.out_arena != never) return false;
  errno = write_memory(ranks_[static_cast<std::size_t>(local)].pid, places.out + offset, from, bytes);
  return errno == 0;
}

Failure PeerAccess::lost(const Group& group, int local, const OpDescriptor& op, int error) const {
  const int rank = group.local_rank_at(local);
  const auto& process = ranks_[static_cast<std::size_t>(local)].process;
  if (error == ESRCH || (process && process->ended())) {
    return {FailureKind::peer_failed, rank, op.seq, group.label(rank) + " died during " + op.name() + ": its process has ended"};
  }
  if (error == ERANGE) return {FailureKind::peer_failed, rank, op.seq, group.label(rank) + " named an array outside its arena in " + op.name()};
  const std::string what = group.label(group.rank) + " cannot reach an array of rank " + std::to_string(rank) + " in " + op.name() + ": " + std::strerror(error);
  switch (error) {
    case EFAULT: return {FailureKind::usage, -1, op.seq, what + "; an array was freed, unmapped or made read-only before its operation had completed"};
    case EPERM: return {FailureKind::peer_failed, -1, op.seq, what + "; the permission to read its memory was revoked (ptrace_scope, credentials); pass peer_memory=False"};
    case ENOMEM: return {FailureKind::peer_failed, group.rank, op.seq, what};
    default: return {FailureKind::peer_failed, -1, op.seq, what};
  }
}

std::optional<Failure> PeerAccess::betrayed(const Group& group, const OpDescriptor& op) const {
  std::array<pollfd, max_local_ranks> watched;
  for (std::size_t r = 0; r < ranks_.size(); ++r) watched[r] = {ranks_[r].process ? ranks_[r].process->descriptor() : -1, POLLIN, 0};
  if (poll(watched.data(), ranks_.size(), 0) <= 0) return std::nullopt;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    if (watched[r].revents != 0) return lost(group, static_cast<int>(r), op, ESRCH);
  }
  return std::nullopt;
}

}  // namespace ff
