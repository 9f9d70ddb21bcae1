// What the threads of a node tell its owner: one queue, and a descriptor that is readable while it holds something.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "fireflyer/storage/engine/engine.hpp"
#include "fireflyer/storage/server/buffers.hpp"

namespace ff {

struct MessageEvent {
  std::uint64_t link;
  std::string body;
  SharedBuffer data;  // nullptr: none
};

struct LostEvent {
  std::uint64_t link;
  std::string reason;
};

struct StagedEvent {
  std::uint64_t target, job;
  Content content;
};

struct StageFailedEvent {
  std::uint64_t target, job;
  std::string kind, message;  // kind: as of EngineErrorKind, or bad_data
};

struct DroppedEvent {
  std::uint64_t target, job;
};

struct AdoptedEvent {
  std::uint64_t target, job;
};

struct DamageEvent {
  std::uint64_t target;
  ChunkId chunk;
};

struct DiskFailedEvent {
  std::uint64_t target;
  std::string message;
};

struct VerifiedEvent {
  std::uint64_t target, job;
  std::optional<ChunkId> last;  // that was verified; none: there are no more behind
  std::uint64_t bytes;
};

using NodeEvent = std::variant<MessageEvent, LostEvent, StagedEvent, StageFailedEvent, DroppedEvent, AdoptedEvent, DamageEvent, DiskFailedEvent, VerifiedEvent>;

// Thread-safe. Only messages could come without end: who receives them stops while the queue is full. Of everything
// else there is not more than what was asked for.
class EventQueue {
 public:
  EventQueue();
  ~EventQueue();
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  int descriptor() const { return descriptor_; }
  void put(NodeEvent event);
  std::vector<NodeEvent> take(std::size_t limit);
  std::size_t size() const;
  bool full() const { return full_; }
  void on_room(std::function<void()> call);  // from `take`, when it is no longer full

 private:
  int descriptor_;
  mutable std::mutex mutex_;
  std::deque<NodeEvent> events_;
  std::size_t body_bytes_ = 0;
  std::atomic<bool> full_ = false;
  std::function<void()> on_room_;
};

}  // namespace ff
