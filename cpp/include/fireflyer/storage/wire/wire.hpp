// The data connection of the chunk store: frames in both directions over one authenticated stream. Little-endian.
//
//   frame = Prefix, body_bytes of body, payload_bytes of payload
//
// Reads are answered natively: the body of `reads` is an array of ReadRequest; each is answered, in any order, by a frame
// `read_reply` with ReadReply, checksums and data. The range that was asked for is cut at multiples of granule_bytes of
// the chunk; there is one CRC-32C for each piece, and the receiver verifies the data against them.
//
// The body of a `message` is for whoever owns the two ends, in either direction; these layers do not look into it. Its
// payload is the data that it speaks of, whose checksum is in the body.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fireflyer/base/crc32c.hpp"
#include "fireflyer/storage/engine/format.hpp"

namespace ff {

inline constexpr std::uint32_t chunk_wire_magic = 0x31434646;  // "FFC1"
inline constexpr std::size_t max_body_bytes = std::size_t{256} << 10;
inline constexpr std::size_t max_payload_bytes = max_block_bytes;
inline constexpr std::size_t max_reads_per_frame = 256;

enum class FrameKind : std::uint16_t {
  reads = 1,
  read_reply = 2,
  message = 3
};

struct Prefix {
  std::uint32_t magic = chunk_wire_magic;
  std::uint32_t crc = 0;  // of everything behind this field, and of the body
  FrameKind kind{};
  std::uint16_t reserved = 0;
  std::uint32_t body_bytes = 0;
  std::uint32_t payload_bytes = 0;
  std::uint32_t reserved_too = 0;
};

struct ReadRequest {
  std::uint64_t tag = 0;  // given back in the reply
  std::uint64_t file = 0;
  std::uint32_t index = 0;
  std::uint32_t chain = 0, chain_version = 0;
  std::uint32_t offset = 0, length = 0;
  std::uint32_t reserved = 0;
};

enum class ReadStatus : std::uint32_t {
  found = 1,
  missing,
  not_committed,  // `where`: the target that knows
  stale,          // other chain version (given), other role, or behind the fence: get routing
  damaged,        // ask another replica
  denied,
  usage,
};

struct ReadReply {
  std::uint64_t tag = 0;
  std::uint64_t version = 0;  // of the content
  std::uint64_t where = 0;
  std::uint32_t made_in = 0;
  std::uint32_t chain_version = 0;  // the replica's
  ReadStatus status{};
  std::uint32_t chunk_length = 0;  // of the whole content
  // followed by a checksum for each piece; the payload is the data
};

static_assert(sizeof(Prefix) == 24 && sizeof(ReadRequest) == 40 && sizeof(ReadReply) == 40);
inline constexpr std::size_t max_pieces = max_block_bytes / granule_bytes + 1;
static_assert(sizeof(ReadReply) + max_pieces * sizeof(std::uint32_t) <= max_body_bytes);

// How many pieces the range has, and where the piece that begins at `at` ends.
constexpr std::size_t pieces_of(std::uint32_t offset, std::uint32_t length) {
  return length == 0 ? 0 : (std::size_t{offset} + length - 1) / granule_bytes - offset / granule_bytes + 1;
}

inline std::uint32_t frame_crc(const Prefix& prefix, const void* body) {
  constexpr std::size_t from = offsetof(Prefix, crc) + sizeof(Prefix::crc);
  return crc32c(crc32c(0, reinterpret_cast<const char*>(&prefix) + from, sizeof prefix - from), body, prefix.body_bytes);
}

}  // namespace ff
