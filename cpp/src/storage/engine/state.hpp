// What the engine knows and has yet to write; its methods are in engine.cpp, for the journal in flush.cpp, and for opening in
// recovery.cpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "blocks.hpp"
#include "checksums.hpp"
#include "fireflyer/base/jobs.hpp"
#include "fireflyer/storage/engine/engine.hpp"
#include "index.hpp"
#include "journal.hpp"

namespace ff {

[[noreturn]] inline void fail(EngineErrorKind kind, const std::string& what) { throw EngineError(kind, what); }

inline std::string name_of(const ChunkId& chunk) { return "chunk " + std::to_string(chunk.file) + ":" + std::to_string(chunk.index); }
inline std::string name_of(const ContentId& id) { return std::to_string(id.made_in) + "." + std::to_string(id.version); }

RequestEntry stored(const CompletionRecord& completion);
Entry request_entry(const CompletionRecord& completion);
Entry follows_entry(std::uint32_t journal, std::uint64_t batches);
// The id behind `chunk`; none behind the last.
std::optional<ChunkId> after(const ChunkId& chunk);

// All that is known, and what of it waits for the disk. `mutex` guards everything but the content of files.
struct ChunkEngine::State {
  State(std::unique_ptr<Disk> disk_given, const EngineOptions& options_given)
      : options(options_given), disk(std::move(disk_given)), blocks(*disk, {options.group_bytes, options.capacity_bytes, options.reserve, options.reserve_at_most_bytes, 4 * options.journal_step}),
        checksums(options.checksum_lines), snapshot_from(options.snapshot_bytes), beside(options.durable && options.sync_beside ? 1 : 0) {}

  using Lock = std::unique_lock<std::mutex>;

  EngineOptions options;
  std::unique_ptr<Disk> disk;
  mutable std::mutex mutex;
  std::mutex tidying;   // taken before `flushing`; whoever has it begins journals
  std::mutex flushing;  // taken before `mutex`; whoever has it writes the journal
  std::mutex growing;   // taken before `mutex`; whoever has it asks the disk for blocks

  ChunkIndex index;
  std::map<ChunkId, Content> pending;
  std::set<ChunkId> staging;  // their blocks are being written
  std::map<std::pair<std::uint64_t, std::uint32_t>, CompletionRecord> requests;
  Blocks blocks;
  ChecksumCache checksums;
  std::set<BlockAddress> unwanted;  // free as soon as their last reader is gone

  // What the next flush writes: entries, the files whose content they speak of, and blocks that are free after it.
  std::vector<Entry> entries;
  std::set<DiskFile*> touched;
  std::vector<BlockAddress> freed;
  Lsn last = 0, durable = 0;
  std::string broken;  // why no more is written

  std::unique_ptr<BatchWriter> journal;
  std::uint32_t journal_number = 0;
  std::uint64_t old_bytes = 0, new_bytes = 0;  // of the journals since the snapshot: of those that are full, of the last one
  std::uint64_t snapshot_from;                 // so long are they when one is written
  bool cramped = false;                        // the disk has no space for more journal: what is left is for commits and removals
  std::atomic<bool> ending = false;
  JobThreads beside;  // syncs a journal while its content is synced

  void recover();
  std::uint64_t read_snapshot(std::uint32_t number);
  std::map<std::uint32_t, std::uint64_t> lengths_told(const std::vector<std::uint32_t>& numbers);
  std::uint64_t read_journal(std::uint32_t number, std::uint64_t least, std::optional<std::uint64_t> length, bool& doubted);
  bool arrived(const std::vector<Entry>& group);
  void apply(const Entry& entry);
  void keep_request(const RequestEntry& r);
  bool replaces(const CompletionRecord& completion) const;
  template <class Each>
  void for_all(const Each& each) const {
    std::optional<ChunkId> next = ChunkId{};
    while (const ChunkRecord* record = next ? index.first_from(*next) : nullptr) {
      each(*record);
      next = after(record->id);
    }
  }
  void take_blocks();
  void check_usable() const {
    if (!broken.empty()) fail(EngineErrorKind::failed, broken);
  }
  [[noreturn]] void break_down(const std::exception& error) {
    if (broken.empty()) broken = error.what();
    fail(EngineErrorKind::failed, broken);
  }
  ChunkStat stat_of(const ChunkRecord& record) const;
  std::optional<ChunkStat> stat(const ChunkId& chunk) const;
  // Applies it, and lets the next flush write it.
  Lsn record(const ChunkId& chunk, const ChunkStat& now, const std::optional<CompletionRecord>& request = std::nullopt);
  Lsn add(const Entry& entry) {
    entries.push_back(entry);
    return ++last;
  }
  void free_later(const Content& content) {
    if (content.has_block()) freed.push_back(content.block());
  }
  void free_now(const BlockAddress& block) {
    if (blocks.pinned(block)) unwanted.insert(block);
    else blocks.release(block);
  }
  // What stage does before and after it writes the content.
  ChunkStat check(const ChunkId& chunk, const Update& update) const;
  ChunkStat to_finish(const ChunkId& chunk, const ContentId& content) const;
  BlockAddress take_block(Lock& lock, std::uint64_t length);
  std::optional<BlockAddress> grow_and_take(Lock& lock, int block_class);
  void write_block(ChunkEngine& engine, DiskFile& file, const ChunkId& chunk, const Update& update, std::uint32_t length, bool has_old,
                   Content& content) const;
  void write_staged(Lock& lock, ChunkEngine& engine, const ChunkId& chunk, const Update& update, std::uint32_t length, bool has_old, Content& content);

  std::uint64_t flush_all();
  void flush_waiting(Lock& lock);
  void write_group(const std::vector<Entry>& group, const std::set<DiskFile*>& files);
  void leave_in_order(Lock& lock);
  std::uint64_t journal_bytes() const { return old_bytes + new_bytes; }
  void take_snapshot();
  std::vector<Entry> copy_records(BatchWriter& writer);
  std::uint64_t snapshot_bytes() const;
  void begin_journal(std::unique_ptr<BatchWriter> fresh);
  std::vector<Entry> next_records(std::optional<ChunkId>& next) const;
};

}  // namespace ff
