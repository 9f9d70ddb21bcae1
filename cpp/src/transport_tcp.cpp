#include <sys/socket.h>

#include <cerrno>

#include "fireflyer/transport.hpp"

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
      if (got == 0) return broken;
      if (errno != EINTR) return later();
    }
  }

  pollfd interest(bool in, bool out) const override {
    return {in || out ? fd_ : -1, static_cast<short>((in ? POLLIN : 0) | (out ? POLLOUT : 0)), 0};
  }

  void close() override { shutdown(fd_, SHUT_RDWR); }

 private:
  static std::ptrdiff_t later() { return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : broken; }

  int fd_;
};

}  // namespace

std::unique_ptr<Transport> tcp_transport(int fd) { return std::make_unique<Tcp>(fd); }

}  // namespace ff
