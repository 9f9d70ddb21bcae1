// Frames as UCX active messages: one message for each offer that LaneRun makes, its first piece (the frame's header) as the
// message's header, its second as the data.
//
// Short messages are copied by the receiver when they arrive, and acknowledged while there is room for another one. Long ones
// use UCX's rendezvous: the data stay where they are until the receiver fetches them to where they belong. Either way a
// stream has one message under way, which counts as sent when the other process has it: so nothing is ever lost by closing,
// nothing piles up, and memory is let go of exactly when `send_some` says so.
//
// UCX's own connections are not authenticated. Every message begins with the key of its direction, which the two leaders
// exchanged over their authenticated connection; whatever comes without is dropped.
#pragma once

#include <ucp/api/ucp.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fireflyer/collectives/transport/fabric.hpp"

namespace ff::ucx {

inline constexpr std::size_t max_head_bytes = 128;      // of a first piece
inline constexpr std::size_t max_short_bytes = 8192;    // of data that are copied
inline constexpr std::size_t max_waiting = 4;           // messages of a stream that nobody has asked for yet
inline constexpr std::size_t max_address_bytes = 16384;

enum class MessageKind : std::uint16_t {
  frame = 1,
  acknowledgement = 2
};

struct Prefix {
  Fabric::Key key;
  std::uint16_t channel, socket;
  MessageKind kind;
  std::uint16_t head_bytes;
};
static_assert(sizeof(Prefix) == 24);

struct Message {
  std::size_t head_bytes = 0, head_read = 0;
  std::size_t bytes = 0, read = 0;  // of data
  void* fetchable = nullptr;        // UCX's descriptor of data that lie at the sender
  std::array<char, max_head_bytes> head;
  std::array<char, max_short_bytes> data;
};

struct Peer {
  ucp_ep_h endpoint = nullptr;
  Fabric::Key outgoing{}, incoming{};
  bool watched = true;  // UCX notices its death, and can cancel what was under way; its shared memory does neither
  bool lost = false;
};

// The two directions of one connection. Owned by the fabric, so that its memory outlives every message.
struct Stream {
  Peer* peer = nullptr;
  bool failed = false;
  // sending
  std::array<char, sizeof(Prefix) + max_head_bytes> out_head;
  Prefix ack_head{};
  void* sending = nullptr;          // UCX's request
  bool unacknowledged = false;      // a short message is under way
  std::size_t offered = 0;          // bytes of the message under way, 0: none
  // receiving
  std::array<Message, max_waiting> waiting;
  std::size_t first = 0, count = 0;
  void* fetching = nullptr;
  bool ack_due = false, ack_owed = false;  // now; once there is room
  void* acking = nullptr;

  bool broken() const { return failed || peer->lost; }
};

class UcxFabric final : public Fabric {
 public:
  UcxFabric() = default;
  ~UcxFabric() override { close(false); }
  std::string open();  // empty, or why not

  std::string address() const override { return address_; }
  std::string meet(int node, const std::string& address, const Key& outgoing, const Key& incoming) override;
  std::unique_ptr<Transport> transport(int node, int channel, int socket) override;
  int descriptor() const override { return descriptor_; }
  bool progress() override;
  bool arm() override;
  void close(bool kindly) override;

  std::ptrdiff_t send(Stream& stream, const iovec* pieces, int count);
  std::ptrdiff_t receive(Stream& stream, void* into, std::size_t bytes);

 private:
  static ucs_status_t on_message(void* self, const void* head, std::size_t head_bytes, void* data, std::size_t bytes, const ucp_am_recv_param_t* param);
  static void on_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);
  ucs_status_t accept(const Prefix& prefix, const char* head, void* data, std::size_t bytes, bool fetchable);
  void take_away(Stream& stream);                     // the first message is read
  bool acknowledge();
  bool idle() const;
  void reap();
  bool drive_until(std::int64_t until_ns, bool (UcxFabric::*over)() const);
  void release_unread();
  void close_endpoints();

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int descriptor_ = -1;
  std::string address_;
  std::map<int, std::unique_ptr<Peer>> peers_;
  std::map<std::tuple<int, int, int>, std::unique_ptr<Stream>> streams_;  // node, channel, socket
  std::vector<void*> closing_;                        // requests
};

}  // namespace ff::ucx
