// Journals and snapshots: batches of entries, appended and made durable in groups.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fireflyer/chunk_format.hpp"
#include "fireflyer/disk.hpp"

namespace ff {

std::string journal_name(std::uint32_t number);
std::string snapshot_name(std::uint32_t number);
// The numbers of the journals or snapshots among `names`, ascending.
std::vector<std::uint32_t> numbers_of(const std::vector<std::string>& names, const std::string& prefix);

// Appends to one new file. Not thread-safe.
class BatchWriter {
 public:
  // Creates `name`; durable, but for what is appended, when this returns.
  BatchWriter(Disk& disk, const std::string& name, std::uint32_t number);

  void append(std::span<const Entry> entries);
  void sync();
  std::uint64_t bytes() const { return offset_; }
  std::uint64_t batches() const { return sequence_ & 0xffffffffu; }

 private:
  void append_batch(std::span<const Entry> entries);

  std::unique_ptr<DiskFile> file_;
  std::uint64_t sequence_, offset_ = 0;
  bool synced_ = true;
  std::vector<std::byte> buffer_;
};

enum class FileEnd {
  whole,    // to its last byte
  torn,     // the last group of batches was never durable: it counts as not written
  damaged,  // what was durable is not there
};

struct BatchesRead {
  FileEnd end;
  std::uint64_t batches;
};

// Gives every entry of `name` to `apply`, in order.
BatchesRead read_batches(Disk& disk, const std::string& name, std::uint32_t number, const std::function<void(const Entry&)>& apply);

}  // namespace ff
