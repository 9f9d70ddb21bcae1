#include <arpa/inet.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "fireflyer/collectives/transport/transport.hpp"

namespace ff {
namespace {

class Tcp final : public Transport {
 public:
  explicit Tcp(int fd) : fd_(fd) {}

  std::ptrdiff_t send_some(const iovec* pieces, int count) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces);
    message.msg_iovlen = static_cast<std::size_t>(count);
    for (;;) {
      const ssize_t sent = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent >= 0) return sent;
      if (errno != EINTR) return later();
    }
  }

  std::ptrdiff_t receive_some(void* into, std::size_t bytes) override {
    for (;;) {
      const ssize_t got = recv(fd_, into, bytes, MSG_DONTWAIT);
      if (got > 0) return got;
      if (got == 0) {
        error_ = 0;
        return broken;
      }
      if (errno != EINTR) return later();
    }
  }

  pollfd interest(bool in, bool out) const override {
    return {in || out ? fd_ : -1, static_cast<short>((in ? POLLIN : 0) | (out ? POLLOUT : 0)), 0};
  }

  Backlog backlog() const override { return tcp_backlog(fd_); }

  std::string reason() const override { return error_ == 0 ? "closed by the other end" : std::strerror(error_); }

  void close() override { shutdown(fd_, SHUT_RDWR); }

 private:
  std::ptrdiff_t later() {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    error_ = errno;
    return broken;
  }

  int fd_;
  int error_ = 0;
};

}  // namespace

Backlog tcp_backlog(int fd) {
  Backlog backlog;
  int bytes = 0;
  if (ioctl(fd, SIOCOUTQ, &bytes) == 0) backlog.unacknowledged = bytes;
  if (ioctl(fd, SIOCINQ, &bytes) == 0) backlog.unread = bytes;
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0) backlog.retransmits = info.tcpi_retransmits;
  return backlog;
}

std::string peer_address(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  char text[INET6_ADDRSTRLEN] = "";
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return "";
  if (peer.ss_family == AF_INET) inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(peer).sin_addr, text, sizeof text);
  if (peer.ss_family == AF_INET6) inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr, text, sizeof text);
  return text;
}

std::unique_ptr<Transport> tcp_transport(int fd) { return std::make_unique<Tcp>(fd); }

}  // namespace ff
