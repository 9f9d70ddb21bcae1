#include "reads.hpp"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "fireflyer/storage/engine/content.hpp"

namespace ff {
namespace {

constexpr std::size_t sendfile_from_bytes = std::size_t{32} << 10;
constexpr std::size_t scratch_bytes = std::size_t{256} << 10;  // of granules that are verified here
constexpr std::size_t max_granted_files = std::size_t{1} << 16, max_granted_ranges = 64;

void put_header(std::byte* at, const ReadReply& reply, std::span<const std::uint32_t> checksums, std::uint32_t length) {
  Prefix prefix;
  prefix.kind = FrameKind::read_reply;
  prefix.body_bytes = static_cast<std::uint32_t>(sizeof reply + checksums.size_bytes());
  prefix.payload_bytes = length;
  std::memcpy(at + sizeof prefix, &reply, sizeof reply);
  if (!checksums.empty()) std::memcpy(at + sizeof prefix + sizeof reply, checksums.data(), checksums.size_bytes());
  prefix.crc = frame_crc(prefix, at + sizeof prefix);
  std::memcpy(at, &prefix, sizeof prefix);
}

std::uint32_t length_of(const ReadRequest& request, const Content& content) {
  return request.offset >= content.length ? 0 : std::min(request.length, content.length - request.offset);
}

// How much of a range belongs to a granule that it has only in part, at its begin and at its end. Not of ranges that lie
// in one granule.
struct Edges {
  std::uint32_t head, tail;
};
Edges edges_of(std::uint32_t offset, std::uint32_t length, std::uint32_t content_length) {
  const std::uint32_t into_first = offset % granule_bytes, end = offset + length;
  return {into_first == 0 ? 0 : static_cast<std::uint32_t>(granule_bytes) - into_first, end == content_length ? 0 : end % static_cast<std::uint32_t>(granule_bytes)};
}

// Where a range begins or ends inside a granule, the part has a checksum of its own.
void set_checksums(std::uint32_t offset, Bytes data, std::span<std::uint32_t> checksums) {
  std::size_t done = 0;
  for (std::uint32_t& checksum : checksums) {
    const std::size_t n = std::min<std::size_t>(granule_bytes - (offset + done) % granule_bytes, data.size() - done);
    checksum = crc32c(0, data.data() + done, n);
    done += n;
  }
}

}  // namespace

std::int64_t fence_clock_ns() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

ReadWeight weight_of(const ReadRequest& request) {
  const std::size_t length = std::min<std::size_t>(request.length, max_block_bytes);
  const std::size_t header = sizeof(Prefix) + sizeof(ReadReply) + (length / granule_bytes + 2) * sizeof(std::uint32_t);
  const std::size_t copied = length < sendfile_from_bytes ? length : 2 * granule_bytes;
  return {header + length, header + copied + 3 * Outbox::piece_bytes};
}

void ReadRights::grant(std::uint64_t from, std::uint64_t to, std::int64_t until_ns) {
  const std::lock_guard lock(mutex_);
  if (to == from + 1) {
    if (files_.size() >= max_granted_files && !files_.contains(from)) files_.erase(files_.begin());  // any: who misses it asks again
    files_[from] = until_ns;
    return;
  }
  std::erase_if(ranges_, [&, now = fence_clock_ns()](const Range& one) { return one.until_ns <= now || (one.from == from && one.to == to); });
  if (ranges_.size() >= max_granted_ranges) throw std::length_error("the connection has capabilities for too many ranges of files; present one that covers them");
  ranges_.push_back({from, to, until_ns});
}

bool ReadRights::allow(std::uint64_t file, std::int64_t now_ns) const {
  if (trusted_) return true;
  const std::lock_guard lock(mutex_);
  const auto found = files_.find(file);
  if (found != files_.end() && now_ns < found->second) return true;
  return std::any_of(ranges_.begin(), ranges_.end(), [&](const Range& one) { return file >= one.from && file < one.to && now_ns < one.until_ns; });
}

void ReadAnswers::refuse(ReadReply& reply, ReadStatus status, Outbox& out) {
  reply.status = status;
  ++counts_.refused;
  put_header(out.room(sizeof(Prefix) + sizeof reply), reply, {}, 0);
}

void ReadAnswers::answer(const ReadRequest& request, const ReadTable& table, const ReadRights& rights, std::int64_t now_ns, bool fetched, Outbox& out) {
  ReadReply reply;
  reply.tag = request.tag;
  ++(fetched ? counts_.fetched : counts_.reads);
  if (!rights.allow(request.file, now_ns)) return refuse(reply, ReadStatus::denied, out);
  const auto found = table.find(request.chain);
  if (found == table.end() || !found->second.serving || found->second.target->closed()) return refuse(reply, ReadStatus::stale, out);
  const PublishedChain& chain = found->second;
  reply.chain_version = chain.chain_version;
  if (now_ns >= chain.fence_until_ns || request.chain_version != chain.chain_version) return refuse(reply, ReadStatus::stale, out);
  if (request.length > max_block_bytes || request.offset > max_block_bytes) return refuse(reply, ReadStatus::usage, out);
  read(request, chain, reply, fetched, out);
}

// What is not in memory is fetched by others: this thread has other links, too. False: it cannot be.
bool ReadAnswers::fetch(const ReadRequest& request, const PublishedChain& chain, ChunkEngine::View& view) {
  const auto shared = std::make_shared<ChunkEngine::View>(std::move(view));
  if (fetch_(request, chain.target, shared, length_of(request, shared->content()))) return true;
  view = std::move(*shared);
  return false;
}

void ReadAnswers::read(const ReadRequest& request, const PublishedChain& chain, ReadReply& reply, bool fetched, Outbox& out) {
  const ChunkId chunk{request.file, request.index};
  bool pending = false;
  auto view = chain.target->engine().view_committed(chunk, pending);
  if (pending && !chain.answers_committed) {
    reply.where = chain.tail;
    return refuse(reply, ReadStatus::not_committed, out);
  }
  if (!view) return refuse(reply, ReadStatus::missing, out);
  const Content content = view->content();
  if (chain.target->damaged(chunk, {content, {}})) return refuse(reply, ReadStatus::damaged, out);
  reply.status = ReadStatus::found;
  reply.version = content.version, reply.made_in = content.made_in, reply.chunk_length = content.length;
  try {
    if (send(request, chain, *view, reply, fetched, out) || fetch(request, chain, *view)) return;
    send(request, chain, *view, reply, true, out);
  } catch (const std::exception&) {
    chain.target->note_damage(chunk, content);
    refuse(reply, ReadStatus::damaged, out);
  }
}

// False: not all of it is in memory, and it may not wait.
bool ReadAnswers::send(const ReadRequest& request, const PublishedChain& chain, ChunkEngine::View& view, const ReadReply& reply, bool may_wait, Outbox& out) {
  ChunkEngine& engine = chain.target->engine();
  const std::uint32_t length = length_of(request, view.content());
  checksums_.resize(pieces_of(request.offset, length));
  // A disk without descriptors is one of tests; its replies are not bounded by their weight.
  if (length >= sendfile_from_bytes && view.file().descriptor() >= 0) return send_file(request, chain, view, reply, may_wait, out);
  const std::size_t header = sizeof(Prefix) + sizeof reply + checksums_.size() * sizeof(std::uint32_t);
  std::byte* const place = out.room(header + length);
  bool there = false;
  try {
    there = length == 0 || load(engine, view, request.offset, MutableBytes(place + header, length), checksums_, may_wait);
  } catch (...) {
    out.give_back(header + length);
    throw;
  }
  if (!there) return out.give_back(header + length), false;
  put_header(place, reply, checksums_, length);
  counts_.read_bytes += length;
  return true;
}

// Whole granules go from the page cache to the socket, whatever the range: only its edges are held in memory.
bool ReadAnswers::send_file(const ReadRequest& request, const PublishedChain& chain, ChunkEngine::View& view, const ReadReply& reply, bool may_wait, Outbox& out) {
  ChunkEngine& engine = chain.target->engine();
  const std::uint32_t offset = request.offset, length = length_of(request, view.content());
  const auto [head, tail] = edges_of(offset, length, view.content().length);
  const std::span<std::uint32_t> checksums(checksums_);
  const std::size_t header = sizeof(Prefix) + sizeof reply + checksums.size_bytes();
  const std::uint64_t at = view.offset() + offset;
  if (!may_wait && !view.file().cached(at, length)) return false;
  if (!engine.checksums(view, offset / granule_bytes, checksums, may_wait)) return false;
  std::byte* const place = out.room(header + head);
  bool there = false;
  try {
    there = (head == 0 || load(engine, view, offset, MutableBytes(place + header, head), checksums.first(1), may_wait)) &&
            (tail == 0 || load(engine, view, offset + length - tail, MutableBytes(tail_).first(tail), checksums.last(1), may_wait));
  } catch (...) {
    out.give_back(header + head);
    throw;
  }
  if (!there) return out.give_back(header + head), false;
  put_header(place, reply, checksums, length);
  out.put(std::shared_ptr<ChunkEngine>(chain.target, &engine), std::move(view), at + head, length - head - tail);
  if (tail > 0) std::memcpy(out.room(tail), tail_.data(), tail);
  counts_.read_bytes += length;
  return true;
}

// The bytes, and in `checksums` those of their pieces. False as in `send`.
bool ReadAnswers::load(ChunkEngine& engine, const ChunkEngine::View& view, std::uint32_t offset, MutableBytes data, std::span<std::uint32_t> checksums, bool may_wait) {
  const std::uint32_t first = offset / granule_bytes;
  const bool whole = offset % granule_bytes == 0 && (data.size() % granule_bytes == 0 || offset + data.size() == view.content().length);
  if (!engine.checksums(view, first, checksums, may_wait)) return false;
  if (whole) return read_all(view.file(), view.offset() + offset, data, may_wait);
  const std::size_t end = std::min<std::size_t>(std::size_t{first + checksums.size()} * granule_bytes, view.content().length);
  std::size_t granule = 0;
  for (std::size_t at = std::size_t{first} * granule_bytes; at < end; at += scratch_.size()) {
    scratch_.resize(std::min(scratch_bytes, end - at));
    if (!read_all(view.file(), view.offset() + at, scratch_, may_wait)) return false;
    for (std::size_t i = 0; i < scratch_.size(); i += granule_bytes) {
      const Bytes whole_one = Bytes(scratch_).subspan(i, std::min(granule_bytes, scratch_.size() - i));
      if (crc32c(0, whole_one.data(), whole_one.size()) != checksums[granule++]) throw EngineError(EngineErrorKind::damaged, "a granule does not match its checksum");
    }
    const std::size_t from = std::max<std::size_t>(at, offset), to = std::min<std::size_t>(at + scratch_.size(), std::size_t{offset} + data.size());
    std::memcpy(data.data() + (from - offset), scratch_.data() + (from - at), to - from);
  }
  set_checksums(offset, data, checksums);
  return true;
}

}  // namespace ff
