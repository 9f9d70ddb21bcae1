#include "fireflyer/collectives/p2p/wire.hpp"

#include "fireflyer/base/crc32c.hpp"

namespace ff {
namespace {

constexpr std::uint32_t exchange_magic = 0x31584646;  // "FFX1"
constexpr std::uint8_t exchange_version = 2;
constexpr std::size_t sealed_bytes = offsetof(ExchangeHeader, header_crc);

std::uint32_t largest_payload(const ExchangeHeader& header) {
  switch (header.type) {
    case ExchangeFrame::hello: return sizeof(std::uint64_t);
    case ExchangeFrame::message: return offer_bytes - 1;
    case ExchangeFrame::segment: return segment_bytes;
    case ExchangeFrame::question: return max_hops * sizeof(ExchangeHop);
    case ExchangeFrame::answer: return sizeof(ExchangeAnswer);
    default: return 0;
  }
}

}  // namespace

ExchangeHeader make_exchange_header(ExchangeFrame type, const OpDescriptor& op, std::uint64_t bytes) {
  ExchangeHeader header{};
  header.magic = exchange_magic;
  header.version = exchange_version;
  header.type = type;
  header.dtype = static_cast<std::uint8_t>(op.dtype);
  header.reduce = static_cast<std::uint8_t>(op.reduce);
  header.number = op.seq;
  header.bytes = bytes;
  header.count = op.count;
  header.kind = static_cast<std::uint32_t>(op.kind);
  header.root = op.root;
  return header;
}

void seal(ExchangeHeader& header) { header.header_crc = crc32c(0, &header, sealed_bytes); }

std::optional<std::string> damage(const ExchangeHeader& header) {
  if (header.magic != exchange_magic) return "does not speak this protocol";
  if (header.version != exchange_version) return "speaks version " + std::to_string(header.version) + " of the protocol, not " + std::to_string(exchange_version);
  if (header.header_crc != crc32c(0, &header, sealed_bytes)) return "sent a frame header with a wrong checksum";
  const bool known = header.type >= ExchangeFrame::hello && header.type <= ExchangeFrame::refused;
  if (!known || header.reserved != 0 || header.dtype >= dtype_count || header.reduce >= reduce_op_count || header.kind >= op_kind_count) return "sent an invalid frame header";
  if (header.size > largest_payload(header)) return "sent a frame of " + std::to_string(header.size) + " bytes, which is too long";
  return std::nullopt;
}

OpDescriptor descriptor(const ExchangeHeader& header) {
  return OpDescriptor{header.number, header.count, static_cast<OpKind>(header.kind), static_cast<DType>(header.dtype), header.root, static_cast<ReduceOp>(header.reduce)};
}

}  // namespace ff
