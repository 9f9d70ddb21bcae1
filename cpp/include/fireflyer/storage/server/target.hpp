// One target of a node: its engine, and the threads that do what touches its disk. A disk that hangs holds up no other one,
// and who reads does not stand behind who writes.
//
//   update threads    write staged content; verify
//   read threads      load content that is to be sent, or that a read waits for
//   flush thread      makes durable, in one go, all that was staged and adopted while it made durable what came before
//   tidying thread    writes the engine's snapshots
//
// What is asked for here comes back as an event, in any order; commit, drop, adopt and forget have taken effect in memory
// when they return, and are durable with what is flushed next, a moment later at the latest.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fireflyer/base/jobs.hpp"
#include "fireflyer/storage/engine/engine.hpp"
#include "fireflyer/storage/server/events.hpp"

namespace ff {

inline constexpr std::chrono::milliseconds close_patience{10'000};

struct StageJob {
  std::uint64_t job = 0;
  ChunkId chunk;
  Update update;            // without its data
  std::uint32_t crc = 0;    // of the data
  std::uint32_t bytes = 0;  // how much data there should be
  SharedBuffer data;
};

// Thread-safe. A disk that failed is told once, and fails every update from then on.
class ChunkTarget : public std::enable_shared_from_this<ChunkTarget> {
 public:
  ChunkTarget(std::uint64_t number, std::unique_ptr<Disk> disk, const EngineOptions& options, int threads, std::shared_ptr<EventQueue> events,
              std::unique_ptr<DirectoryLock> lock = nullptr);
  ~ChunkTarget();
  ChunkTarget(const ChunkTarget&) = delete;
  ChunkTarget& operator=(const ChunkTarget&) = delete;

  std::uint64_t number() const { return number_; }
  ChunkEngine& engine() { return engine_; }
  DiskSpace space();  // as it was a moment ago: a disk that hangs is not waited for

  void stage(StageJob job);                                                           // StagedEvent or StageFailedEvent
  void commit(const ChunkId& chunk, const ContentId& content);
  void drop(std::uint64_t job, const ChunkId& chunk, const ContentId& content,
            const std::optional<CompletionRecord>& completion);  // DroppedEvent when durable; job 0: nobody waits for it
  void adopt(std::uint64_t job, const std::vector<CompletionRecord>& completions, bool reset);     // AdoptedEvent when durable, in order
  void forget(std::uint64_t client);
  void verify(std::uint64_t job, std::optional<ChunkId> after, std::uint64_t limit_bytes);  // VerifiedEvent
  // All of a content that is pending or committed, verified; `loaded` is not called if it is not there or damaged.
  void load(const ChunkId& chunk, const ContentId& content, std::shared_ptr<BufferPool> pool, std::function<void(SharedBuffer)> loaded);
  // Brings what the view holds of [from, from + bytes) into the page cache, then calls; false: it is closed, and does not.
  bool fetch(std::shared_ptr<ChunkEngine::View> view, std::uint32_t from, std::uint32_t bytes, std::function<void()> then);

  // Damage stays on record until the chunk has other content.
  bool damaged(const ChunkId& chunk, const ChunkStat& stat) const;
  void note_damage(const ChunkId& chunk, const Content& content);

  std::size_t jobs() const;
  // Ends what was begun, flushes, and gives the directory to others; then nothing is served or written. Throws EngineError:
  // failed, if not all could be written; hung, if the disk does not answer: the target ends when it does.
  void close(std::chrono::milliseconds patience = close_patience);
  bool closed() const { return closed_; }

 private:
  struct Waiting {
    NodeEvent event;
    std::uint64_t job;
  };

  void flush_what_waits();
  bool flush_group(std::vector<Waiting>& group);
  void fail_group(const std::vector<Waiting>& group, const std::exception& error);
  void tidy();
  std::string end();
  void stage_now(const StageJob& job);
  Content stage_with_room(const StageJob& job, Lsn& lsn);
  void verify_now(std::uint64_t job, std::optional<ChunkId> after, std::uint64_t limit_bytes);
  SharedBuffer load_now(const ChunkId& chunk, const ContentId& content, BufferPool& pool);
  void stage_failed(std::uint64_t job, const std::string& kind, const std::string& message);
  void disk_failed(const std::string& message);
  void tell_when_flushed(NodeEvent event, std::uint64_t job);
  void flush_later();

  const std::uint64_t number_;
  std::unique_ptr<DirectoryLock> lock_;
  Disk& disk_;
  ChunkEngine engine_;
  const std::shared_ptr<EventQueue> events_;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable has_flush_;
  std::vector<Waiting> waiting_;  // for the flush that begins next
  std::optional<std::chrono::steady_clock::time_point> flush_at_;
  bool stopped_ = false;
  std::map<ChunkId, BlockAddress> damaged_;
  DiskSpace space_;
  bool looking_ = false;  // for space
  std::atomic<bool> failed_ = false, closed_ = false, tidying_ = false;

  JobThreads updates_, reads_, tidier_;
  std::thread flusher_;
};

const char* name_of(EngineErrorKind kind);

}  // namespace ff
