#include "link.hpp"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fireflyer/base/crc32c.hpp"

namespace ff {

ExchangeLink::ExchangeLink(int rank_, int fd_) : rank(rank_), fd(fd_), local(false) {
  int domain = 0;
  socklen_t length = sizeof domain;
  local = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 && domain == AF_UNIX;
  ucred peer{};
  length = sizeof peer;
  if (local && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0) pid = peer.pid;
}

ExchangeLink::~ExchangeLink() { shut(); }

void ExchangeLink::shut() {
  const int closing = std::exchange(fd, -1);
  if (closing >= 0) ::close(closing);
}

void ExchangeLink::push(OutFrame frame) {
  if (!frame.own.empty()) frame.header.size = static_cast<std::uint32_t>(frame.own.size());
  const char* payload = frame.own.empty() ? frame.data : frame.own.data();
  if (frame.header.type == ExchangeFrame::answer) ++unread_answers;
  if (!local && frame.header.size > 0) frame.header.payload_crc = crc32c(0, payload, frame.header.size);
  seal(frame.header);
  out.push_back(std::move(frame));
}

bool ExchangeLink::written() const { return !out.empty() && out_sent_ == sizeof(ExchangeHeader) + out.front().header.size; }

ExchangeLink::Result ExchangeLink::write(std::size_t& bytes) {
  if (mute) return Result::broken;
  OutFrame& frame = out.front();
  const char* payload = frame.own.empty() ? frame.data : frame.own.data();
  while (!written()) {
    iovec parts[2];
    std::size_t n = 0;
    if (out_sent_ < sizeof(ExchangeHeader)) parts[n++] = {reinterpret_cast<char*>(&frame.header) + out_sent_, sizeof(ExchangeHeader) - out_sent_};
    const std::size_t done = out_sent_ > sizeof(ExchangeHeader) ? out_sent_ - sizeof(ExchangeHeader) : 0;
    if (done < frame.header.size) parts[n++] = {const_cast<char*>(payload) + done, frame.header.size - done};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = n;
    const ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Result::blocked;
    if (sent < 0) {
      mute = true;  // reading will say what happened
      return Result::broken;
    }
    out_sent_ += static_cast<std::size_t>(sent);
    bytes += static_cast<std::size_t>(sent);
  }
  out_sent_ = 0;
  return Result::moved;
}

ExchangeLink::Result ExchangeLink::read(std::size_t& bytes) {
  iovec parts[2];
  std::size_t n = 0;
  if (want_ > 0) parts[n++] = {into_, want_};
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  parts[n++] = {buffer_.data() + end_, buffer_.size() - end_};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = n;
  ssize_t got = 0;
  do {
    got = recvmsg(fd, &message, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Result::blocked;
  if (got <= 0) return Result::broken;
  const auto fresh = static_cast<std::size_t>(got);
  short_ = fresh < want_ + buffer_.size() - end_;
  const std::size_t direct = std::min(want_, fresh);
  if (!local && direct > 0) crc_ = crc32c(crc_, into_, direct);
  into_ += direct;
  want_ -= direct;
  end_ += fresh - direct;
  bytes += fresh;
  return Result::moved;
}

bool ExchangeLink::take_header() {
  if (end_ - begin_ < sizeof header) return false;
  std::memcpy(&header, buffer_.data() + begin_, sizeof header);
  begin_ += sizeof header;
  return true;
}

void ExchangeLink::expect(char* into) {
  into_ = into;
  want_ = header.size;
  crc_ = 0;
  in_payload = true;
}

bool ExchangeLink::take_payload() {
  const std::size_t ready = std::min(want_, end_ - begin_);
  if (ready > 0) {
    std::memcpy(into_, buffer_.data() + begin_, ready);
    if (!local) crc_ = crc32c(crc_, into_, ready);
    begin_ += ready;
    into_ += ready;
    want_ -= ready;
  }
  if (want_ > 0) return false;
  in_payload = false;
  return true;
}

}  // namespace ff
