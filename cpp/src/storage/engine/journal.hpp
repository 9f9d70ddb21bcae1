// Journals and snapshots: batches of entries, appended and made durable in groups.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fireflyer/storage/engine/disk.hpp"
#include "fireflyer/storage/engine/format.hpp"

namespace ff {

std::string journal_name(std::uint32_t number);
std::string snapshot_name(std::uint32_t number);
// The numbers of the journals or snapshots among `names`, ascending.
std::vector<std::uint32_t> numbers_of(const std::vector<std::string>& names, const std::string& prefix);
// What so many entries take in a file.
std::uint64_t bytes_for(std::size_t entries);

// Appends to one new file. Not thread-safe.
class BatchWriter {
 public:
  // Creates `name`; durable, but for what is appended, when this returns.
  BatchWriter(Disk& disk, const std::string& name, std::uint32_t number);

  // Space for `bytes` more, as zeros: a sync after writing over them changes nothing of the file but its content. Asks for at
  // least `step_bytes` at once. False: the disk has no space.
  bool make_room(std::uint64_t bytes, std::uint64_t step_bytes);
  std::uint64_t room() const { return end_ - offset_; }
  bool reserve(std::uint64_t bytes);  // space only; false: the disk has none

  // `with_content`: the content that these entries speak of is not durable yet.
  void append(std::span<const Entry> entries, bool with_content);
  // An empty batch, which says that all before it is durable, if that was not said already. The next one takes its place: it
  // says the same, and until then a process that is killed leaves this one to the page cache.
  void mark();
  void sync();
  void now_durable() { synced_ = true; }  // all that was appended, and the content that it speaks of
  std::uint64_t bytes() const { return offset_; }
  std::uint64_t batches() const { return sequence_ & 0xffffffffu; }

 private:
  void append_batch(std::span<const Entry> entries, bool with_content);
  void write_batch(std::span<const Entry> entries, bool with_content);  // to where the next one goes

  std::unique_ptr<DiskFile> file_;
  std::uint64_t sequence_, offset_ = 0, end_ = 0;
  bool synced_ = true, content_ = false, marked_ = false;  // of what was appended
  std::vector<std::byte> buffer_;
};

// Reads what a BatchWriter wrote, as far as it is there.
class BatchReader {
 public:
  BatchReader(Disk& disk, const std::string& name, std::uint32_t number);

  // The next batch, its entries in `entries`; none behind the last whole one.
  std::optional<BatchHeader> next(std::vector<Entry>& entries);
  // There is none here: does one further on say that all before it was durable?
  bool lost() const;
  std::uint64_t batches() const { return sequence_ & 0xffffffffu; }  // so many were given
  std::uint64_t bytes() const { return offset_; }
  DiskFile& file() const { return *file_; }

 private:
  std::optional<BatchHeader> read(std::uint64_t offset, std::vector<std::byte>& buffer) const;

  std::unique_ptr<DiskFile> file_;
  std::uint64_t sequence_, offset_ = 0, size_;
  std::vector<std::byte> buffer_;
};

}  // namespace ff
