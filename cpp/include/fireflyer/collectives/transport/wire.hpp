// Frames between the leaders of nodes. Little endian, 64 bytes of header, everything checked before it is used.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "fireflyer/collectives/group/operation.hpp"

namespace ff {

static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

enum class FrameType : std::uint8_t {
  partial = 1,
  result = 2,
  heartbeat = 3,
  abort = 4,
  goodbye = 5,
  contribution = 6  // a partial sum of one rank's array alone, in the array's own type: widened by who adds it
};

struct Header {
  std::uint32_t magic;
  std::uint8_t version;
  FrameType type;
  std::uint8_t channel;       // 0 in control frames
  std::uint8_t dtype;
  std::uint64_t seq;
  std::uint64_t chunk;        // of the operation, from 0
  std::uint64_t count;        // elements of the whole operation
  std::uint32_t bytes;        // of the payload
  std::uint32_t kind;         // OpKind | ReduceOp << 16; of an abort: FailureKind
  std::int32_t root;          // of an abort: the culprit
  std::uint32_t payload_crc;
  std::uint32_t block;        // of the chunk: the first one
  std::uint32_t span;         // how many blocks; 0 in control frames
  std::uint32_t reserved;
  std::uint32_t header_crc;   // over all of the above
};
static_assert(sizeof(Header) == 64 && std::is_trivially_copyable_v<Header>);

inline constexpr std::size_t max_control_payload = 1024;

// A sealed header of a control frame.
Header control_header(FrameType type, const OpDescriptor& op, const void* payload, std::size_t bytes);
// Of a data frame, not yet sealed: chunk, channel, block, span, bytes and payload_crc are the caller's to fill in.
Header data_header(FrameType type, const OpDescriptor& op);
void seal(Header& header);                           // sets header_crc
std::optional<std::string> damage(const Header& header);  // what is wrong with it by itself
OpDescriptor descriptor(const Header& header);

}  // namespace ff
