// One end of a connection that is already made and authenticated: an ordered stream of bytes that never blocks.
//
// Whoever drives the network is the only caller. It offers memory, is told how much of it is through, and offers the rest
// again later, the same memory with the same contents: a transport that works in the background may count bytes as sent
// only when it needs them no longer.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace ff {

// Bytes between the transport and the other end of its connection; -1 where that is unknown.
struct Backlog {
  std::int64_t unacknowledged = -1;  // sent, and not confirmed by the other system
  std::int64_t retransmits = -1;     // how often in a row they have been sent again in vain
  std::int64_t unread = -1;          // come, and not yet received
};

class Transport {
 public:
  static constexpr std::ptrdiff_t broken = -1;

  virtual ~Transport() = default;
  // Bytes of the pieces, in their order, that are on their way; 0 when none can be now; `broken` for good.
  virtual std::ptrdiff_t send_some(const iovec* pieces, int count) = 0;
  // Bytes that have come; 0 when none have; `broken` at the end of the stream or for good.
  virtual std::ptrdiff_t receive_some(void* into, std::size_t bytes) = 0;
  // Whether memory of the last offer is being read although `send_some` has counted none of it yet.
  virtual bool holds() const { return false; }
  // What to poll in order to hear of either; a negative descriptor where there is nothing to wait for.
  virtual pollfd interest(bool in, bool out) const = 0;
  // What the system knows of it, for the flight recorder.
  virtual Backlog backlog() const { return {}; }
  // After `broken`: why, for people; empty where nobody knows.
  virtual std::string reason() const { return ""; }
  virtual void close() = 0;  // both directions; the other end sees the end of the stream
};

std::unique_ptr<Transport> tcp_transport(int fd);  // borrows the descriptor
Backlog tcp_backlog(int fd);
std::string peer_address(int fd);  // IPv4 or IPv6, for people; empty where it has none

}  // namespace ff
