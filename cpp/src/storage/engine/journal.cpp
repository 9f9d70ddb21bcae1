#include "journal.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "fireflyer/base/crc32c.hpp"

namespace ff {
namespace {

constexpr std::size_t crc_from = offsetof(BatchHeader, crc) + sizeof(BatchHeader::crc);
constexpr std::uint64_t zeros_bytes = std::uint64_t{256} << 10;  // written at once

std::string numbered(const char* prefix, std::uint32_t number) {
  char name[32];
  std::snprintf(name, sizeof name, "%s%08u", prefix, number);
  return name;
}

constexpr std::size_t batch_bytes(std::size_t entries) {
  return (sizeof(BatchHeader) + entries * sizeof(Entry) + batch_align_bytes - 1) / batch_align_bytes * batch_align_bytes;
}

static_assert(batch_bytes(entries_per_batch) <= max_batch_bytes);

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

std::uint64_t bytes_for(std::size_t entries) {
  const std::size_t rest = entries % entries_per_batch;
  return entries / entries_per_batch * batch_bytes(entries_per_batch) + (rest == 0 ? 0 : batch_bytes(rest));
}

// ---------------------------------------------------------------------------------------------- writing

BatchWriter::BatchWriter(Disk& disk, const std::string& name, std::uint32_t number)
    : file_(disk.create(name)), sequence_(std::uint64_t{number} << 32) {
  disk.sync_directory();
}

bool BatchWriter::reserve(std::uint64_t bytes) {
  try {
    file_->allocate(offset_, bytes);
  } catch (const DiskError& error) {
    if (!error.no_space()) throw;
    return false;
  }
  return true;
}

bool BatchWriter::make_room(std::uint64_t bytes, std::uint64_t step_bytes) {
  if (room() >= bytes) return true;
  const std::uint64_t more = std::max(bytes - room(), step_bytes);
  try {
    file_->allocate(end_, more);
    const std::vector<std::byte> zeros(std::min<std::uint64_t>(more, zeros_bytes));
    for (std::uint64_t done = 0; done < more; done += zeros.size())
      file_->write(end_ + done, Bytes(zeros).first(std::min<std::uint64_t>(zeros.size(), more - done)));
  } catch (const DiskError& error) {
    if (!error.no_space()) throw;
    return false;
  }
  end_ += more;
  return true;
}

void BatchWriter::append(std::span<const Entry> entries, bool with_content) {
  for (; !entries.empty(); entries = entries.subspan(std::min(entries.size(), entries_per_batch)))
    append_batch(entries.first(std::min(entries.size(), entries_per_batch)), with_content);
}

void BatchWriter::mark() {
  if (!content_ || !synced_ || marked_ || room() < batch_align_bytes) return;
  write_batch({}, false);
  marked_ = true;
}

void BatchWriter::write_batch(std::span<const Entry> entries, bool with_content) {
  buffer_.assign(batch_bytes(entries.size()), std::byte{0});
  BatchHeader header;
  header.sequence = sequence_;
  header.entries = static_cast<std::uint32_t>(entries.size());
  header.flags = (synced_ ? batch_after_sync : 0) | (with_content ? batch_with_content : 0);
  header.bytes = buffer_.size();
  if (!entries.empty()) std::memcpy(buffer_.data() + sizeof header, entries.data(), entries.size_bytes());
  std::memcpy(buffer_.data(), &header, sizeof header);
  header.crc = crc32c(0, buffer_.data() + crc_from, buffer_.size() - crc_from);
  std::memcpy(buffer_.data(), &header, sizeof header);
  file_->write(offset_, buffer_);
}

void BatchWriter::append_batch(std::span<const Entry> entries, bool with_content) {
  write_batch(entries, with_content);
  offset_ += buffer_.size();
  end_ = std::max(end_, offset_);
  ++sequence_;
  synced_ = marked_ = false;
  content_ = with_content;
}

void BatchWriter::sync() { file_->sync(); }

// ---------------------------------------------------------------------------------------------- reading

BatchReader::BatchReader(Disk& disk, const std::string& name, std::uint32_t number)
    : file_(disk.open(name)), sequence_(std::uint64_t{number} << 32), size_(file_->size()) {}

// The batch of this file at `offset`; none if it is not whole.
std::optional<BatchHeader> BatchReader::read(std::uint64_t offset, std::vector<std::byte>& buffer) const {
  buffer.resize(batch_align_bytes);
  if (offset >= size_ || file_->read(offset, buffer) != buffer.size()) return std::nullopt;
  BatchHeader header;
  std::memcpy(&header, buffer.data(), sizeof header);
  if (header.magic != journal_magic || header.entries > entries_per_batch || header.bytes != batch_bytes(header.entries)) return std::nullopt;
  if (header.sequence >> 32 != sequence_ >> 32) return std::nullopt;
  buffer.resize(header.bytes);
  const MutableBytes rest = MutableBytes(buffer).subspan(batch_align_bytes);
  if (file_->read(offset + batch_align_bytes, rest) != rest.size()) return std::nullopt;
  if (crc32c(0, buffer.data() + crc_from, buffer.size() - crc_from) != header.crc) return std::nullopt;
  return header;
}

std::optional<BatchHeader> BatchReader::next(std::vector<Entry>& entries) {
  const auto header = read(offset_, buffer_);
  if (!header || header->sequence != sequence_) return std::nullopt;
  entries.resize(header->entries);
  if (!entries.empty()) std::memcpy(entries.data(), buffer_.data() + sizeof(BatchHeader), entries.size() * sizeof(Entry));
  offset_ += header->bytes;
  ++sequence_;
  return header;
}

bool BatchReader::lost() const {
  std::vector<std::byte> buffer;
  for (std::uint64_t at = offset_; at + batch_align_bytes <= size_; at += batch_align_bytes) {
    const auto header = read(at, buffer);
    if (header && header->sequence > sequence_ && (header->flags & batch_after_sync)) return true;
  }
  return false;
}

}  // namespace ff
