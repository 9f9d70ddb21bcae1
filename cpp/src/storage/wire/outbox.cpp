#include "fireflyer/storage/wire/outbox.hpp"

#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace ff {
namespace {

constexpr std::size_t gathered_bytes = std::size_t{256} << 10;  // of small things that are sent together
constexpr std::size_t max_gathered_pieces = 16;

}  // namespace

std::byte* Outbox::room(std::size_t bytes) {
  if (pieces_.empty() || !pieces_.back().own() || pieces_.back().bytes.size() + bytes > gathered_bytes) {
    Piece& fresh = pieces_.emplace_back();
    if (!spares_->kept.empty()) {
      fresh.bytes = std::move(spares_->kept.back());
      spares_->kept.pop_back();
      fresh.bytes.clear();
    }
  }
  Piece& last = pieces_.back();
  last.bytes.resize(last.bytes.size() + bytes);
  last.left += bytes;
  own_bytes_ += bytes;
  waiting_bytes_ += bytes;
  return last.bytes.data() + last.bytes.size() - bytes;
}

void Outbox::give_back(std::size_t bytes) {
  Piece& last = pieces_.back();
  last.bytes.resize(last.bytes.size() - bytes);
  last.left -= bytes;
  own_bytes_ -= bytes;
  waiting_bytes_ -= bytes;
}

void Outbox::put(Bytes memory, std::shared_ptr<void> keep) {
  if (memory.empty()) return;
  Piece& piece = pieces_.emplace_back();
  piece.left = memory.size();
  piece.shared = memory;
  piece.keep = std::move(keep);
  ++shared_pieces_;
}

void Outbox::put(std::shared_ptr<ChunkEngine> engine, ChunkEngine::View view, std::uint64_t at, std::size_t bytes) {
  Piece& piece = pieces_.emplace_back();
  piece.engine = std::move(engine);
  piece.view = std::move(view);
  piece.at = at;
  piece.left = bytes;
  waiting_bytes_ += bytes;
}

// The first piece, together with those in memory behind it.
long Outbox::send_some(int fd) {
  Piece& first = pieces_.front();
  if (first.view) {
    auto at = static_cast<off_t>(first.at);
    const ssize_t n = ::sendfile(fd, first.view->file().descriptor(), &at, first.left);
    if (n == 0) errno = EIO;  // the file is shorter than its records say
    return n == 0 ? -1 : n;
  }
  iovec parts[max_gathered_pieces];
  std::size_t count = 0;
  for (auto piece = pieces_.begin(); piece != pieces_.end() && !piece->view && count < max_gathered_pieces; ++piece)
    parts[count++] = {const_cast<std::byte*>(piece->memory()), piece->left};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT | (count < pieces_.size() ? MSG_MORE : 0));
}

void Outbox::sent(std::size_t bytes) {
  sent_bytes_ += bytes;
  while (!pieces_.empty()) {
    Piece& piece = pieces_.front();
    const std::size_t n = std::min(bytes, piece.left);
    bytes -= n;
    piece.at += n;
    piece.left -= n;
    if (piece.shared.empty()) waiting_bytes_ -= n;
    if (piece.own()) own_bytes_ -= n;
    if (piece.left > 0) return;
    if (!piece.shared.empty()) --shared_pieces_;
    if (piece.bytes.capacity() > 0 && spares_->kept.size() < Spares::most) spares_->kept.push_back(std::move(piece.bytes));
    pieces_.pop_front();
  }
}

bool Outbox::flush(int fd) {
  while (!pieces_.empty()) {
    const long n = send_some(fd);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    sent(static_cast<std::size_t>(n));
  }
  return true;
}

}  // namespace ff
