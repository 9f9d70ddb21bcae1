#include "chunk_journal.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <optional>

#include "fireflyer/crc32c.hpp"

namespace ff {
namespace {

constexpr std::size_t crc_from = offsetof(BatchHeader, crc) + sizeof(BatchHeader::crc);

std::string numbered(const char* prefix, std::uint32_t number) {
  char name[32];
  std::snprintf(name, sizeof name, "%s%08u", prefix, number);
  return name;
}

constexpr std::size_t batch_bytes(std::size_t entries) {
  return (sizeof(BatchHeader) + entries * sizeof(Entry) + batch_align_bytes - 1) / batch_align_bytes * batch_align_bytes;
}

static_assert(batch_bytes(entries_per_batch) <= max_batch_bytes);

// The batch at `offset` as it is on disk; none if it is not whole.
std::optional<BatchHeader> read_batch(const DiskFile& file, std::uint64_t offset, std::vector<std::byte>& buffer) {
  buffer.resize(batch_align_bytes);
  if (file.read(offset, buffer) != buffer.size()) return std::nullopt;
  BatchHeader header;
  std::memcpy(&header, buffer.data(), sizeof header);
  if (header.magic != journal_magic || header.entries > entries_per_batch || header.bytes != batch_bytes(header.entries)) return std::nullopt;
  buffer.resize(header.bytes);
  const MutableBytes rest = MutableBytes(buffer).subspan(batch_align_bytes);
  if (file.read(offset + batch_align_bytes, rest) != rest.size()) return std::nullopt;
  if (crc32c(0, buffer.data() + crc_from, buffer.size() - crc_from) != header.crc) return std::nullopt;
  return header;
}

// Does a batch behind `offset` say that everything before it was durable?
bool followed(const DiskFile& file, std::uint64_t offset, std::uint64_t size, std::uint64_t sequence) {
  std::vector<std::byte> buffer;
  for (; offset + batch_align_bytes <= size; offset += batch_align_bytes) {
    const auto header = read_batch(file, offset, buffer);
    const bool later = header && header->sequence >> 32 == sequence >> 32 && header->sequence > sequence;
    if (later && (header->flags & batch_after_sync)) return true;
  }
  return false;
}

}  // namespace

std::string journal_name(std::uint32_t number) { return numbered("journal-", number); }
std::string snapshot_name(std::uint32_t number) { return numbered("snapshot-", number); }

std::vector<std::uint32_t> numbers_of(const std::vector<std::string>& names, const std::string& prefix) {
  std::vector<std::uint32_t> numbers;
  for (const std::string& name : names) {
    std::uint32_t number = 0;
    if (!name.starts_with(prefix)) continue;
    const char* const end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + prefix.size(), end, number);
    if (parsed.ec == std::errc{} && parsed.ptr == end) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

BatchWriter::BatchWriter(Disk& disk, const std::string& name, std::uint32_t number)
    : file_(disk.create(name)), sequence_(std::uint64_t{number} << 32) {
  disk.sync_directory();
}

void BatchWriter::append(std::span<const Entry> entries) {
  for (; !entries.empty(); entries = entries.subspan(std::min(entries.size(), entries_per_batch)))
    append_batch(entries.first(std::min(entries.size(), entries_per_batch)));
}

void BatchWriter::append_batch(std::span<const Entry> entries) {
  buffer_.assign(batch_bytes(entries.size()), std::byte{0});
  BatchHeader header;
  header.sequence = sequence_;
  header.entries = static_cast<std::uint32_t>(entries.size());
  header.flags = synced_ ? batch_after_sync : 0;
  header.bytes = buffer_.size();
  std::memcpy(buffer_.data() + sizeof header, entries.data(), entries.size_bytes());
  std::memcpy(buffer_.data(), &header, sizeof header);
  header.crc = crc32c(0, buffer_.data() + crc_from, buffer_.size() - crc_from);
  std::memcpy(buffer_.data(), &header, sizeof header);
  file_->write(offset_, buffer_);
  offset_ += buffer_.size();
  ++sequence_;
  synced_ = false;
}

void BatchWriter::sync() {
  file_->sync();
  synced_ = true;
}

BatchesRead read_batches(Disk& disk, const std::string& name, std::uint32_t number, const std::function<void(const Entry&)>& apply) {
  const auto file = disk.open(name);
  const std::uint64_t size = file->size();
  std::uint64_t sequence = std::uint64_t{number} << 32, offset = 0;
  std::vector<std::byte> buffer;
  const auto ended = [&sequence](FileEnd end) { return BatchesRead{end, sequence & 0xffffffffu}; };
  for (; offset < size; ++sequence) {
    const auto header = read_batch(*file, offset, buffer);
    if (!header || header->sequence != sequence) return ended(followed(*file, offset, size, sequence) ? FileEnd::damaged : FileEnd::torn);
    for (std::size_t i = 0; i < header->entries; ++i) {
      Entry entry;
      std::memcpy(&entry, buffer.data() + sizeof(BatchHeader) + i * sizeof(Entry), sizeof entry);
      apply(entry);
    }
    offset += header->bytes;
  }
  return ended(FileEnd::whole);
}

}  // namespace ff
