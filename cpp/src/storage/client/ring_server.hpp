// One connection of a ring, and the reads that are under way on all of them.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "fireflyer/storage/client/ring.hpp"
#include "fireflyer/storage/wire/outbox.hpp"

namespace ff {

struct ReadSlot {
  bool used = false, cancelled = false, batched = false;
  std::uint32_t generation = 0;  // a late reply to an earlier user of the slot is nobody's
  int server = -1;
  ReadRequest request;
  MutableBytes into;
  ChunkRing::Keep keep;
};

// Reads by the numbers that they have on the wire: slot, and how often it was used before.
class ReadSlots {
 public:
  std::uint64_t open(ReadSlot slot);
  ReadSlot* find(std::uint64_t number);
  void close(std::uint64_t number);
  std::vector<std::uint64_t> of_server(int server) const;

 private:
  static std::uint64_t number_of(std::uint32_t slot, std::uint32_t generation) { return std::uint64_t{generation} << 32 | slot; }
  std::vector<ReadSlot> slots_;
  std::vector<std::uint32_t> free_;
};

class RingServer {
 public:
  RingServer(int number, int fd, ReadSlots& slots, std::deque<RingEvent>& events) : number_(number), fd_(fd), slots_(slots), events_(events) {}
  ~RingServer();
  RingServer(const RingServer&) = delete;
  RingServer& operator=(const RingServer&) = delete;

  int fd() const { return fd_; }
  bool broken() const { return fd_ < 0; }
  bool has_to_send() const { return !out_.empty(); }
  std::size_t under_way() const { return reads_ + unanswered_; }

  void prepare(std::uint64_t number, const ReadRequest& request);
  void prepare(const std::string& body, Bytes data, ChunkRing::Keep keep);
  void frame_prepared();
  void send();
  void receive();
  void cancel(std::uint64_t number);
  void fail(const std::string& why);

  std::uint32_t interest = 0;  // of the ring: what it watches for
  bool told_lost = false;

 private:
  // The read's reply that is being received.
  struct Arriving {
    ReadReply reply;
    std::uint32_t length = 0;
    std::size_t done = 0, checked = 0, piece = 0;
    bool sound = true;
    std::uint32_t crc = 0;  // of what was checked
    std::vector<std::uint32_t> checksums;
  };

  bool take();
  bool take_header();
  bool take_reply(const Prefix& prefix, const std::byte* body);
  bool take_message(const Prefix& prefix, const std::byte* body);
  bool take_data(Arriving& a);
  static void check_pieces(Arriving& a, const ReadSlot& slot);
  void finish(Arriving& a);
  void complete(std::uint64_t number, Completion completion);
  bool receive_some();

  const int number_;
  int fd_;
  ReadSlots& slots_;
  std::deque<RingEvent>& events_;
  std::size_t reads_ = 0, unanswered_ = 0;

  std::vector<ReadRequest> prepared_;
  Outbox::Spares spares_;
  Outbox out_{spares_};

  std::vector<std::byte> in_;
  std::size_t begin_ = 0, end_ = 0;
  std::optional<Arriving> arriving_;
  std::optional<ReceivedMessage> message_;  // whose data are being received
  std::size_t message_bytes_ = 0, to_drop_ = 0;
  std::vector<std::uint32_t> spare_;  // checksums of the reply before
};

}  // namespace ff
