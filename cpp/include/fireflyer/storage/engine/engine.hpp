// The chunks of one target on one disk: copy-on-write blocks, checksums for every 4 KiB, one journal that decides.
//
// An update is first *staged*: its content is written to a free block, and becomes the chunk's *pending* content when a
// record in the journal says so. `commit` makes pending content the committed one. What is durable after a crash is what
// the journal says: all that was reported durable, and nothing in part. Blocks are never written while a record or a
// reader has them, so committed content stays as it was until the commit of its successor is durable.
//
// Thread-safe. The engine does not order updates of one chunk: who calls it does; a second `stage` of a chunk whose first
// one has not returned is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "fireflyer/storage/engine/disk.hpp"
#include "fireflyer/storage/engine/format.hpp"

namespace ff {

enum class EngineErrorKind {
  usage,     // never valid
  conflict,  // the chunk is not what the caller takes it for
  no_space,  // at the limit or the reserve; reads, commits and removals go on
  damaged,   // bytes on disk are not what was written
  failed,    // the disk refused a write or a sync: the engine takes no more of them
  hung,      // the disk does not answer
};

class EngineError : public std::runtime_error {
 public:
  EngineError(EngineErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  EngineErrorKind kind() const { return kind_; }

 private:
  EngineErrorKind kind_;
};

struct EngineOptions {
  std::uint64_t group_bytes = std::uint64_t{64} << 20;    // how much space is asked of the disk at once
  std::uint64_t capacity_bytes = 0;                       // for all blocks; 0: what the disk has
  double reserve = 0.05;                                  // share of the disk that is left free
  std::uint64_t reserve_at_most_bytes = UINT64_MAX;       // ... and of a large disk no more than this
  std::uint64_t snapshot_bytes = std::uint64_t{64} << 20; // of journal, after which a snapshot is taken
  std::size_t snapshot_step = 1024;                       // records copied for it without giving the lock back
  std::uint64_t max_chunks = std::uint64_t{1} << 26;      // their records are in memory, and an empty one takes nothing else
  std::uint64_t journal_step = std::uint64_t{2} << 20;    // how much journal is asked of the disk at once; half of it is kept in hand
  bool sync_beside = true;                                // content and journal at once; false: one after the other, journal first
  std::size_t checksum_lines = std::size_t{1} << 17;      // of 64 KiB of content each, that are kept in memory (112 bytes)
  bool durable = true;                                    // false: nothing waits for the disk; a power cut loses the last seconds
};

enum class UpdateKind : std::uint8_t {
  write,     // data at offset; what lies between the old end and the offset becomes zeros
  truncate,  // to `length`, longer or shorter
  remove,
  replace,   // data is the whole content, whatever was there: also the same content, where that is damaged
};

struct Request {
  std::uint64_t client = 0, sequence = 0;
  std::uint32_t channel = 0;
  auto operator<=>(const Request&) const = default;
};

// What became of the last update of a channel. Records may come in any order: the highest sequence stays, and of one update the
// content that was made rather than that it was given up (version 0).
struct CompletionRecord {
  Request request;
  ChunkId chunk;
  ContentId content;
  bool operator==(const CompletionRecord&) const = default;
};

struct Update {
  UpdateKind kind = UpdateKind::write;
  std::uint32_t offset = 0, length = 0;  // `length`: of a truncate
  Bytes data;
  std::optional<std::uint32_t> data_crc;  // what it must be: other data are refused (usage)
  ContentId base;  // what must be committed now (version 0: absent); replace does not look at it
  ContentId next;
  std::optional<Request> request;  // durable together with the staged content
};

struct ChunkStat {
  Content committed, pending;
};

struct EngineStats {
  std::uint64_t chunks = 0, pending = 0, file_bytes = 0, taken_bytes = 0, journal_bytes = 0, memory_bytes = 0, requests = 0;
};

using Lsn = std::uint64_t;  // log sequence number of an entry; an entry is durable when durable() >= its number

class ChunkEngine {
 public:
  // Content that stays readable, and its block unused by others, as long as this lives. Not longer than the engine.
  class View {
   public:
    View() = default;
    View(View&& other) noexcept { *this = std::move(other); }
    View& operator=(View&& other) noexcept;
    ~View();
    const ChunkId& chunk() const { return chunk_; }
    const Content& content() const { return content_; }
    const DiskFile& file() const { return *file_; }  // not of content without bytes
    std::uint64_t offset() const { return offset_; }  // of the content's first byte in the file
    std::uint64_t trailer_offset() const { return offset_ + block_bytes(content_.block_class); }

   private:
    friend class ChunkEngine;
    ChunkEngine* engine_ = nullptr;
    ChunkId chunk_;
    Content content_;
    const DiskFile* file_ = nullptr;
    std::uint64_t offset_ = 0;
  };

  // Opens what `disk` holds, or begins anew in an empty directory. Throws EngineError damaged if what was durable is gone.
  ChunkEngine(std::unique_ptr<Disk> disk, const EngineOptions& options);
  ~ChunkEngine();
  ChunkEngine(const ChunkEngine&) = delete;
  ChunkEngine& operator=(const ChunkEngine&) = delete;

  // Writes the content; returns what is pending then. Repeating it (same next id) changes nothing.
  Content stage(const ChunkId& chunk, const Update& update, Lsn& lsn);
  Lsn commit(const ChunkId& chunk, const ContentId& content);  // what is pending; a removal leaves no record
  // Drops what is pending. `completion`, if any, replaces the record of its channel, also one that says that it was done.
  Lsn drop(const ChunkId& chunk, const ContentId& content, const std::optional<CompletionRecord>& completion = std::nullopt);
  Lsn adopt(const std::vector<CompletionRecord>& completions, bool reset);  // `reset`: forgets all others first
  Lsn forget_client(std::uint64_t client);

  // Makes durable what waits for it, and returns the last durable one. One caller at a time does it for all. Throws
  // EngineError no_space if the disk has no space for more journal: then all still waits, and may be tried again.
  Lsn flush();
  // Writes a snapshot when the journal has become long, while all else goes on. May take seconds, so that nobody should wait
  // for it; without space it is tried again when the journal has grown.
  void tidy();
  bool untidy() const;
  // Ends tidy, flushes, and notes that there is nothing in doubt.
  void end();
  Lsn durable() const;

  std::optional<ChunkStat> stat(const ChunkId& chunk) const;
  std::optional<CompletionRecord> request(std::uint64_t client, std::uint32_t channel) const;
  std::vector<CompletionRecord> requests(std::uint64_t client, std::uint32_t channel, std::size_t limit) const;  // from there on, in order
  std::vector<ChunkId> pending() const;                                                                    // chunks, in order
  std::vector<std::pair<ChunkId, ChunkStat>> list(const ChunkId& from, const ChunkId& to, std::size_t limit) const;
  std::optional<std::pair<ChunkId, ChunkStat>> last_before(const ChunkId& to) const;

  // Committed content (or pending), for reading. Nullopt: absent.
  std::optional<View> view(const ChunkId& chunk, bool pending = false);
  // Committed content; `has_pending`: something is pending, looked at in the same instant.
  std::optional<View> view_committed(const ChunkId& chunk, bool& has_pending);
  // Verified bytes from `offset`; fewer only at the end of the content.
  std::size_t read(const View& view, std::uint32_t offset, MutableBytes into) const;
  // The stored checksums of granules first, first + 1, ...; the last one of a content covers what there is of it. False:
  // they are not in memory, and it may not wait.
  bool checksums(const View& view, std::uint32_t first, std::span<std::uint32_t> into, bool may_wait = true) const;
  // Reads all of it, and its trailer; throws EngineError damaged.
  void verify(const ChunkId& chunk, const View& view) const;

  EngineStats stats() const;

 private:
  struct State;
  std::optional<View> pinned(const ChunkId& chunk, const Content& content);  // with the lock
  std::unique_ptr<State> state_;
};

}  // namespace ff
