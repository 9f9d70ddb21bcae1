#include "fireflyer/collectives/transport/wire.hpp"

#include <cstring>

#include "fireflyer/base/crc32c.hpp"

namespace ff {
namespace {

constexpr std::uint32_t frame_magic = 0x31434646;  // "FFC1"
constexpr std::uint8_t frame_version = 3;
constexpr std::size_t sealed_bytes = offsetof(Header, header_crc);

}  // namespace

Header data_header(FrameType type, const OpDescriptor& op) {
  Header header{};
  header.magic = frame_magic;
  header.version = frame_version;
  header.type = type;
  header.dtype = static_cast<std::uint8_t>(op.dtype);
  header.seq = op.seq;
  header.count = op.count;
  header.kind = static_cast<std::uint32_t>(op.kind) | static_cast<std::uint32_t>(op.reduce) << 16;
  header.root = op.root;
  return header;
}

Header control_header(FrameType type, const OpDescriptor& op, const void* payload, std::size_t bytes) {
  Header header = data_header(type, op);
  header.bytes = static_cast<std::uint32_t>(bytes);
  header.payload_crc = crc32c(0, payload, bytes);
  seal(header);
  return header;
}

void seal(Header& header) { header.header_crc = crc32c(0, &header, sealed_bytes); }

std::optional<std::string> damage(const Header& header) {
  if (header.magic != frame_magic) return "does not speak this protocol";
  if (header.version != frame_version) return "speaks version " + std::to_string(header.version) + " of the protocol, not " + std::to_string(frame_version);
  if (header.header_crc != crc32c(0, &header, sealed_bytes)) return "sent a frame header with a wrong checksum";
  if (header.reserved != 0 || header.dtype >= dtype_count || header.kind >> 16 >= reduce_op_count) return "sent an invalid frame header";
  return std::nullopt;
}

OpDescriptor descriptor(const Header& header) {
  return OpDescriptor{header.seq, header.count, static_cast<OpKind>(header.kind & 0xffff), static_cast<DType>(header.dtype), header.root,
                      static_cast<ReduceOp>(header.kind >> 16)};
}

}  // namespace ff
