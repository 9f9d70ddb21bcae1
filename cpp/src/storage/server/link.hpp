// One data connection, as its thread sees it: frames that come in, and the outbox. It never blocks; where it cannot go on
// it says what it waits for, and its thread calls `work` again when that is there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cold.hpp"
#include "fireflyer/storage/wire/outbox.hpp"
#include "reads.hpp"

namespace ff {

using SharedTable = std::atomic<std::shared_ptr<const ReadTable>>;

// What other threads may touch of a link.
struct LinkShare {
  LinkShare(std::uint64_t id_given, bool reads_given, BufferPool::Account owner_given) : id(id_given), reads(reads_given), owner(std::move(owner_given)) {}
  const std::uint64_t id;
  const bool reads;
  const BufferPool::Account owner;  // whose memory it is while the link is not trusted
  ReadRights rights;
  // What waits to be sent: handed over by others, and in the outbox.
  std::atomic<std::size_t> handed_frames = 0, handed_bytes = 0, waiting_pieces = 0, waiting_bytes = 0;
};

struct LinkContext {
  const SharedTable& table;
  EventQueue& events;
  BufferPool& pool;
  ServerCounts& counts;
  LinkPatience patience;
  ColdReads* cold = nullptr;           // of the thread; none: targets fetch with threads of theirs
  Outbox::Spares* spares = nullptr;  // of the thread
};

class Link {
 public:
  enum class Pause {
    none,
    room,    // replies that were not taken yet
    events,  // the owner has to take events first
    memory,  // for a payload
    share,   // for what it holds of replies and of a frame; it has to be asked again now and then
    disk,    // reads that are being fetched
  };

  // Called by any thread, for what had to wait: the memory for a payload; a read whose content is in memory now.
  struct Later {
    BufferPool::Granted granted;
    std::function<void(const ReadRequest&)> fetched;
  };

  Link(int fd, std::shared_ptr<LinkShare> share, LinkContext context, Later later);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int fd() const { return fd_; }
  LinkShare& share() { return *share_; }
  bool has_to_send() const { return !out_.empty(); }
  Pause pause() const { return pause_; }
  const std::string& reason() const { return reason_; }
  // For memory; none: as long as it takes. Then what was to be received is dropped.
  std::optional<std::int64_t> patience_ends_ns() const { return pause_ == Pause::memory ? patience_ends_ns_ : std::nullopt; }

  // When it has held memory for too long, by what it received and sent so far; none: it holds none.
  std::optional<std::int64_t> ends_ns() const;
  std::string stall_reason(std::int64_t now_ns) const;

  // Receives and sends as far as possible. False: the link is over, `reason` says why.
  bool work();
  void enqueue(const std::vector<std::byte>& frame, SharedBuffer data);
  void give_memory(SharedBuffer memory);
  void end_patience();
  void answer_fetched(const ReadRequest& request);

  std::uint32_t interest = 0;  // of its thread: what it watches for

 private:
  enum class Step {
    more,
    starved,
    paused,
    over
  };

  Step over(std::string why);
  Step paused(Pause why) {
    pause_ = why;
    return Step::paused;
  }
  Step take();
  Step take_frame();
  Step take_reads(const Prefix& prefix, const std::byte* body);
  Step take_message(const Prefix& prefix, const std::byte* body);
  Step begin_payload();
  Step take_payload();
  Step take_dropped();
  void deliver(SharedBuffer data);
  bool fetch(const ReadRequest& request, const std::shared_ptr<ChunkTarget>& target, std::shared_ptr<ChunkEngine::View> view, std::uint32_t length);
  bool receive();
  bool flush();
  void limit_payload();
  void limit_sending();
  void limit_frame(bool incomplete);
  const BufferPool::Account& account() const { return share_->rights.trusted() ? context_.pool.services() : share_->owner; }
  std::size_t held_bytes() const;
  bool hold(std::size_t more);
  void give_back_what_is_free();
  void tell_waiting();

  int fd_;
  std::shared_ptr<LinkShare> share_;
  LinkContext context_;
  Later later_;
  ReadAnswers answers_;
  Outbox out_;
  Pause pause_ = Pause::none;
  std::string reason_;

  std::vector<std::byte> in_;
  std::size_t begin_ = 0, end_ = 0;
  std::size_t next_read_ = 0;  // of the frame at `begin_`: those before it were answered
  // The message whose payload is awaited.
  std::string body_;
  std::size_t payload_bytes_ = 0, done_ = 0, to_drop_ = 0;
  std::size_t fetching_ = 0, fetching_bytes_ = 0, fetching_held_ = 0;  // reads, and their weights
  // Of the pool, and whose it is: a link may become trusted.
  std::size_t reserved_bytes_ = 0;
  BufferPool::Account reserved_of_;
  SharedBuffer payload_;
  std::uint64_t place_ = 0;  // in the line for memory
  std::optional<std::int64_t> patience_ends_ns_;
  std::int64_t payload_until_ns_ = 0, sending_until_ns_ = 0, unread_until_ns_ = 0, frame_until_ns_ = 0;  // 0: not now
  std::uint64_t unread_from_ = 0;  // bytes that were sent when `unread_until_ns_` was set
};

}  // namespace ff
