#include "fireflyer/storage/wire/stream.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstring>

#include "fireflyer/storage/wire/wire.hpp"

namespace ff {
namespace {

constexpr int idle_before_probes_s = 10, probe_interval_s = 5, probes = 3;

}  // namespace

void prepare_stream(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  const auto set = [fd](int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof value); };  // what is no TCP refuses it
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, idle_before_probes_s);
  set(IPPROTO_TCP, TCP_KEEPINTVL, probe_interval_s);
  set(IPPROTO_TCP, TCP_KEEPCNT, probes);
}

std::vector<std::byte> message_frame(const std::string& body, std::size_t payload_bytes) {
  Prefix prefix;
  prefix.kind = FrameKind::message;
  prefix.body_bytes = static_cast<std::uint32_t>(body.size());
  prefix.payload_bytes = static_cast<std::uint32_t>(payload_bytes);
  prefix.crc = frame_crc(prefix, body.data());
  std::vector<std::byte> frame(sizeof prefix + body.size());
  std::memcpy(frame.data(), &prefix, sizeof prefix);
  if (!body.empty()) std::memcpy(frame.data() + sizeof prefix, body.data(), body.size());
  return frame;
}

}  // namespace ff
