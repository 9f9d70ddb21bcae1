#include "fireflyer/storage/engine/content.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "fireflyer/base/crc32c.hpp"
#include "state.hpp"

namespace ff {
namespace {

constexpr std::size_t piece_bytes = std::size_t{256} << 10;  // what stays in a second-level cache between its passes
static_assert(piece_bytes % granule_bytes == 0);

[[noreturn]] void damaged(const std::string& what) { fail(EngineErrorKind::damaged, what + "; repair it from another replica"); }

}  // namespace

bool read_all(const DiskFile& file, std::uint64_t offset, MutableBytes into, bool may_wait) {
  std::optional<std::size_t> got;
  try {
    got = may_wait ? file.read(offset, into) : file.read_cached(offset, into);
  } catch (const DiskError& error) {
    damaged(error.what());
  }
  if (got && *got != into.size()) damaged("a block is behind the end of its file");
  return got.has_value();
}

namespace {

// What lies in [from, from + into.size()) of the new content.
struct Mixture {
  std::uint32_t data_offset;
  Bytes data;
  const ChunkEngine::View* old;

  std::uint32_t data_end() const { return data_offset + static_cast<std::uint32_t>(data.size()); }
  bool all_new(std::uint32_t from, std::size_t bytes) const { return from >= data_offset && from + bytes <= data_end(); }

  void fill(std::uint32_t from, MutableBytes into) const {
    const auto to = from + static_cast<std::uint32_t>(into.size());
    // Old bytes that new ones cover are not read, unless they share a granule with some that stay.
    if (from < data_offset || to > data_end()) {
      std::size_t got = 0;
      if (old != nullptr && from < old->content().length)
        got = read_content(old->file(), old->offset(), old->chunk(), old->content(), from, into.first(std::min<std::size_t>(into.size(), old->content().length - from)));
      std::memset(into.data() + got, 0, into.size() - got);
    }
    const std::uint32_t first = std::max(from, data_offset), last = std::min(to, data_end());
    if (first < last) std::memcpy(into.data() + (first - from), data.data() + (first - data_offset), last - first);
  }
};

std::uint32_t mark_of(const ChunkId& chunk, const ContentId& content) {
  const std::uint64_t words[] = {chunk.file, chunk.index, content.made_in, content.version};
  return crc32c(0, words, sizeof words);
}

// The checksums of the granules of `piece`, and that of the content so far continued over them.
std::uint32_t add_checksums(std::uint32_t crc, Bytes piece, std::uint32_t* checksums) {
  while (!piece.empty()) {
    const std::size_t n = std::min(piece.size(), granule_bytes);
    *checksums = crc32c(0, piece.data(), n);
    crc = crc32c_joined(crc, *checksums++, n);
    piece = piece.subspan(n);
  }
  return crc;
}

// The checksum of what lies in [from, to), whole granules of a content, joined from theirs.
std::uint32_t joined(std::span<const std::uint32_t> checksums, std::uint32_t from, std::uint32_t to) {
  std::uint32_t crc = 0;
  for (std::uint32_t at = from; at < to; at += granule_bytes)
    crc = crc32c_joined(crc, checksums[at / granule_bytes], std::min<std::size_t>(granule_bytes, to - at));
  return crc;
}

}  // namespace

void refuse_data() { fail(EngineErrorKind::usage, "the data do not match the length or checksum of the update"); }

void write_content(const BlockPlace& place, const ChunkId& chunk, Content& content, std::uint32_t length, std::uint32_t data_offset, Bytes data,
                   const std::optional<std::uint32_t>& data_crc, const ChunkEngine::View* old) {
  const Mixture mixture{data_offset, data, old};
  const std::size_t granules = granules_of(length);
  std::vector<std::byte> scratch, trailer(trailer_bytes(place.block_class));
  std::vector<std::uint32_t> checksums(granules);
  std::uint32_t crc = 0;
  for (std::uint32_t at = 0; at < length;) {
    const std::size_t n = std::min<std::size_t>(piece_bytes, length - at);
    Bytes piece;
    if (mixture.all_new(at, n)) {
      piece = data.subspan(at - data_offset, n);
    } else {
      scratch.resize(piece_bytes);
      mixture.fill(at, MutableBytes(scratch).first(n));
      piece = Bytes(scratch).first(n);
    }
    crc = add_checksums(crc, piece, checksums.data() + at / granule_bytes);
    place.file.write(place.offset + at, piece);
    at += static_cast<std::uint32_t>(n);
  }
  if (data_crc && *data_crc != (data.size() == length ? crc : joined(checksums, data_offset, mixture.data_end()))) refuse_data();
  content.length = length;
  content.crc = crc;
  TrailerHeader header;
  header.file = chunk.file, header.index = chunk.index;
  header.version = content.version, header.made_in = content.made_in;
  header.length = length, header.content_crc = crc, header.granules = static_cast<std::uint32_t>(granules);
  std::memcpy(trailer.data(), &header, sizeof header);
  for (std::uint32_t& checksum : checksums) checksum ^= mark_of(chunk, content.id());
  if (granules > 0) std::memcpy(trailer.data() + sizeof header, checksums.data(), granules * sizeof(std::uint32_t));
  constexpr std::size_t crc_from = offsetof(TrailerHeader, crc) + sizeof(TrailerHeader::crc);
  header.crc = crc32c(0, trailer.data() + crc_from, sizeof header + granules * sizeof(std::uint32_t) - crc_from);
  std::memcpy(trailer.data(), &header, sizeof header);
  place.file.write(place.offset + block_bytes(place.block_class), trailer);
}

bool read_checksums(const DiskFile& file, std::uint64_t offset, const ChunkId& chunk, const Content& content, std::uint32_t first,
                    std::span<std::uint32_t> into, bool may_wait) {
  const std::uint64_t at = offset + block_bytes(content.block_class) + sizeof(TrailerHeader) + first * sizeof(std::uint32_t);
  if (!read_all(file, at, std::as_writable_bytes(into), may_wait)) return false;
  const std::uint32_t mark = mark_of(chunk, content.id());
  for (std::uint32_t& checksum : into) checksum ^= mark;
  return true;
}

std::size_t read_content(const DiskFile& file, std::uint64_t offset, const ChunkId& chunk, const Content& content, std::uint32_t from, MutableBytes into) {
  if (from >= content.length) return 0;
  const std::size_t wanted = std::min<std::size_t>(into.size(), content.length - from);
  std::vector<std::byte> granule;
  std::vector<std::uint32_t> checksums;
  for (std::size_t done = 0; done < wanted;) {
    const auto at = from + static_cast<std::uint32_t>(done);
    const auto first = static_cast<std::uint32_t>(at / granule_bytes);
    const std::size_t start = std::size_t{first} * granule_bytes;
    // Whole granules go straight into the caller's memory, pieces of one through a buffer.
    const std::size_t left = wanted - done;
    const bool tail = at == start && at + left == content.length;
    const std::size_t whole = at != start ? 0 : tail ? left
                                                     : left / granule_bytes * granule_bytes;
    const std::size_t n = whole != 0 ? std::min(whole, piece_bytes) : std::min(granule_bytes, content.length - start);
    MutableBytes target = whole != 0 ? into.subspan(done, n) : (granule.resize(granule_bytes), MutableBytes(granule).first(n));
    read_all(file, offset + start, target);
    checksums.resize(granules_of(n));
    read_checksums(file, offset, chunk, content, first, checksums);
    for (std::size_t i = 0; i < checksums.size(); ++i) {
      const Bytes part = Bytes(target).subspan(i * granule_bytes, std::min(granule_bytes, n - i * granule_bytes));
      if (crc32c(0, part.data(), part.size()) != checksums[i])
        damaged("bytes " + std::to_string(start + i * granule_bytes) + " and following of a block are not what was written");
    }
    if (whole != 0) {
      done += n;
    } else {
      const std::size_t skip = at - start, part = std::min(n - skip, left);
      std::memcpy(into.data() + done, granule.data() + skip, part);
      done += part;
    }
  }
  return wanted;
}

void verify_content(const DiskFile& file, std::uint64_t offset, const ChunkId& chunk, const Content& content) {
  std::vector<std::byte> trailer(sizeof(TrailerHeader) + granules_of(content.length) * sizeof(std::uint32_t));
  TrailerHeader header;
  read_all(file, offset + block_bytes(content.block_class), trailer);
  std::memcpy(&header, trailer.data(), sizeof header);
  constexpr std::size_t crc_from = offsetof(TrailerHeader, crc) + sizeof(TrailerHeader::crc);
  const bool sound = header.magic == trailer_magic && header.crc == crc32c(0, trailer.data() + crc_from, trailer.size() - crc_from);
  const bool same = header.file == chunk.file && header.index == chunk.index && header.version == content.version && header.made_in == content.made_in;
  if (!sound || !same || header.length != content.length || header.content_crc != content.crc)
    damaged("the trailer of " + name_of(chunk) + " is not what was written");
  std::vector<std::uint32_t> written(granules_of(content.length)), found(written.size());
  if (!written.empty()) std::memcpy(written.data(), trailer.data() + sizeof header, written.size() * sizeof(std::uint32_t));
  std::vector<std::byte> buffer(std::min<std::size_t>(piece_bytes, content.length));
  std::uint32_t crc = 0;
  for (std::uint32_t at = 0; at < content.length;) {
    const MutableBytes piece = MutableBytes(buffer).first(std::min<std::size_t>(buffer.size(), content.length - at));
    read_all(file, offset + at, piece);
    crc = add_checksums(crc, piece, found.data() + at / granule_bytes);
    at += static_cast<std::uint32_t>(piece.size());
  }
  const std::uint32_t mark = mark_of(chunk, content.id());
  for (std::size_t i = 0; i < found.size(); ++i)
    if ((found[i] ^ mark) != written[i]) damaged("bytes " + std::to_string(i * granule_bytes) + " and following of " + name_of(chunk) + " are not what was written");
  if (crc != content.crc) damaged(name_of(chunk) + " is not what was written");
}

}  // namespace ff
