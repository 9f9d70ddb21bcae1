#include "chunk_reads.hpp"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace ff {
namespace {

constexpr std::size_t sendfile_from_bytes = std::size_t{32} << 10;
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

// Where a range begins or ends inside a granule, that one is verified here, and the part has a checksum of its own.
void read_parts(ChunkEngine& engine, const ChunkEngine::View& view, std::uint32_t offset, MutableBytes data, std::span<std::uint32_t> checksums) {
  engine.read(view, offset, data);
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

void ReadRights::grant(std::uint64_t from, std::uint64_t to, std::int64_t until_ns) {
  const std::lock_guard lock(mutex_);
  if (to == from + 1) {
    if (files_.size() >= max_granted_files && !files_.contains(from)) std::erase_if(files_, [now = fence_clock_ns()](const auto& one) { return one.second <= now; });
    if (files_.size() >= max_granted_files && !files_.contains(from)) throw std::length_error("a connection has rights to too many files; ask for a range");
    files_[from] = until_ns;
    return;
  }
  std::erase_if(ranges_, [&, now = fence_clock_ns()](const Range& one) { return one.until_ns <= now || (one.from == from && one.to == to); });
  if (ranges_.size() >= max_granted_ranges) throw std::length_error("a connection has rights to too many ranges of files; ask for one that covers them");
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

// What is not in memory is fetched by others: this thread has other links, too.
bool ReadAnswers::fetch(const ReadRequest& request, const PublishedChain& chain, ChunkEngine::View& view) {
  const std::uint32_t length = length_of(request, view.content());
  if (length == 0) return false;
  const std::size_t checksums = sizeof(TrailerHeader) + granules_of(request.offset + length) * sizeof(std::uint32_t);
  if (view.file().cached(view.trailer_offset(), checksums) && view.file().cached(view.offset() + request.offset, length)) return false;
  const auto shared = std::make_shared<ChunkEngine::View>(std::move(view));
  if (fetch_(request, *chain.target, shared, length)) return true;
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
  if (!fetched && fetch(request, chain, *view)) return;
  reply.version = content.version, reply.made_in = content.made_in, reply.chunk_length = content.length;
  try {
    send(request, chain, std::move(*view), reply, out);
  } catch (const std::exception&) {
    chain.target->note_damage(chunk, content);
    refuse(reply, ReadStatus::damaged, out);
  }
}

void ReadAnswers::send(const ReadRequest& request, const PublishedChain& chain, ChunkEngine::View view, ReadReply& reply, Outbox& out) {
  const Content& content = view.content();
  ChunkEngine& engine = chain.target->engine();
  reply.status = ReadStatus::found;
  const std::uint32_t length = length_of(request, content);
  const std::size_t pieces = pieces_of(request.offset, length);
  const bool whole = request.offset % granule_bytes == 0 && (length % granule_bytes == 0 || request.offset + length == content.length);
  checksums_.resize(pieces);
  counts_.read_bytes += length;
  if (whole && pieces > 0) engine.checksums(view, request.offset / granule_bytes, checksums_);
  const std::size_t header = sizeof(Prefix) + sizeof reply + pieces * sizeof(std::uint32_t);
  if (whole && length >= sendfile_from_bytes && view.file().descriptor() >= 0) {
    put_header(out.room(header), reply, checksums_, length);
    const std::uint64_t at = view.offset() + request.offset;
    out.put(std::shared_ptr<ChunkEngine>(chain.target, &engine), std::move(view), at, length);
    return;
  }
  std::byte* const place = out.room(header + length);
  const MutableBytes data(place + header, length);
  try {
    if (!whole) read_parts(engine, view, request.offset, data, checksums_);
    else if (length > 0 && view.file().read(view.offset() + request.offset, data) != length) throw EngineError(EngineErrorKind::damaged, "a block is behind the end of its file");
  } catch (...) {
    out.give_back(header + length);
    throw;
  }
  put_header(place, reply, checksums_, length);
}

}  // namespace ff
