// Frames between two ranks. Little endian, 64 bytes of header, everything checked before it is used.
//
// A message is announced once: a short one as `message`, its bytes behind it; a longer one as `offer`, without them. The
// receiver, as soon as it has a place for them, reads the sender's memory and says `taken`, or says `go`, after which the
// bytes come as `segment`s in order. So a connection always drains, and answers are never stuck behind somebody's data.
//
// A question about a point-to-point message names in `number` and `root`: by a sender, its message and its tag; by a
// receiver, how many messages of the other rank it has seen announced, or the message that its receive has met.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "fireflyer/collectives/group/operation.hpp"

namespace ff {

enum class ExchangeFrame : std::uint8_t {
  hello = 1,
  message = 2,
  offer = 3,
  go = 4,
  segment = 5,
  taken = 6,
  credit = 7,
  question = 8,
  answer = 9,
  goodbye = 10,
  refused = 11  // an offer whose size or type is not that of the receive that it met: the calls end, nothing else does
};

inline constexpr OpKind point_to_point = static_cast<OpKind>(0);  // send and receive, which are no group operations

struct ExchangeHeader {
  std::uint32_t magic;
  std::uint8_t version;
  ExchangeFrame type;
  std::uint8_t dtype;
  std::uint8_t reduce;
  std::uint64_t number;       // of the group operation; of a point-to-point message among those that its sender sent here
  std::uint64_t bytes;        // of the whole message; of a question: its own number
  std::uint64_t count;        // as in OpDescriptor
  std::uint64_t place;        // segment: offset; offer, hello: an address in the sender; credit: bytes; question: bits;
                              // refused: the number of the receive, which the other fields describe
  std::uint32_t kind;         // OpKind, or 0: point to point
  std::int32_t root;          // as in OpDescriptor; point to point: the tag
  std::uint32_t size;         // bytes that follow this header
  std::uint32_t payload_crc;  // of them; 0 on connections within a host
  std::uint32_t reserved;
  std::uint32_t header_crc;   // over all of the above
};
static_assert(sizeof(ExchangeHeader) == 64 && std::is_trivially_copyable_v<ExchangeHeader>);

// One rank's place in a chain of ranks that wait for each other, and its call.
struct ExchangeHop {
  std::int32_t rank;
  std::uint32_t call;  // 0 recv, 1 send, otherwise OpKind << 1
  std::uint64_t number;
  std::int32_t tag;
  std::uint32_t reserved;
};
static_assert(sizeof(ExchangeHop) == 24 && std::is_trivially_copyable_v<ExchangeHop>);

enum class ExchangeState : std::uint32_t {
  matching = 1,   // has made the call that was asked about
  different = 2,  // has made another call in its place: `op`
  waiting = 3,    // waits for somebody else
  idle = 4,       // computes, or does nothing
};

struct ExchangeAnswer {
  ExchangeState state;
  std::int32_t waits_for;      // a rank; -1 where it is not known, and for a receive from any rank (op_kind 0)
  std::int64_t idle_ns;        // since it last did anything in this group
  std::uint64_t op_number, op_count;
  std::uint32_t op_kind;
  std::int32_t op_root;
  std::uint32_t op_dtype, op_reduce;
};
static_assert(sizeof(ExchangeAnswer) == 48 && std::is_trivially_copyable_v<ExchangeAnswer>);

inline constexpr std::uint64_t question_asker_sends = 1;  // bits of a question's `place`
inline constexpr std::uint64_t question_is_serious = 2;   // the asker has waited for its whole timeout
inline constexpr std::size_t max_hops = 64;
inline constexpr std::size_t offer_bytes = 64 * 1024;     // messages from this size on are offered
inline constexpr std::size_t segment_bytes = 256 * 1024;  // fits a core's own cache: its checksum and its copy read it once
inline constexpr std::size_t credit_bytes = 512 * 1024;   // of messages that a receiver keeps for one peer before it wants them
inline constexpr std::size_t message_cost = 64;           // what a message counts for beside its bytes

ExchangeHeader make_exchange_header(ExchangeFrame type, const OpDescriptor& op, std::uint64_t bytes);
void seal(ExchangeHeader& header);
std::optional<std::string> damage(const ExchangeHeader& header);
OpDescriptor descriptor(const ExchangeHeader& header);

}  // namespace ff
