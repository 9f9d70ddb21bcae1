#include "link.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fireflyer/base/clock.hpp"

namespace ff {
namespace {

constexpr std::size_t receive_bytes = std::size_t{16} << 10;  // grows for larger bodies
constexpr std::size_t max_replies_bytes = std::size_t{8} << 20;  // waiting for one link; then its reads wait in the socket
constexpr std::size_t max_fetching = 256;                       // reads of one link that wait for the disk; then others wait, too
constexpr int receives_per_turn = 64;                           // then other links of the thread have theirs
constexpr std::int64_t ns_per_payload_byte = 250;  // 4 MB/s at least
constexpr std::int64_t memory_patience_ns = 200'000'000;

}  // namespace

Link::Link(int fd, std::shared_ptr<LinkShare> share, LinkContext context, Later later)
    : fd_(fd),
      share_(std::move(share)),
      context_(context),
      later_(std::move(later)),
      answers_(context.counts, [this](const ReadRequest& request, const auto& target, auto view, std::uint32_t length) { return fetch(request, target, std::move(view), length); }),
      in_(receive_bytes) {}

Link::~Link() {
  if (place_ != 0) context_.pool.cancel(place_);
  ::close(fd_);
}

Link::Step Link::over(std::string why) {
  reason_ = std::move(why);
  return Step::over;
}

// ---------------------------------------------------------------------------------------------- what was received

Link::Step Link::take() {
  if (to_drop_ > 0) return take_dropped();
  if (payload_) return take_payload();
  if (payload_bytes_ > 0) return begin_payload();
  return take_frame();
}

Link::Step Link::take_frame() {
  if (end_ - begin_ < sizeof(Prefix)) return Step::starved;
  Prefix prefix;
  std::memcpy(&prefix, in_.data() + begin_, sizeof prefix);
  const bool reads = prefix.kind == FrameKind::reads && share_->reads;
  if (prefix.magic != chunk_wire_magic || !(reads || prefix.kind == FrameKind::message)) return over("peer sent an invalid frame");
  if (prefix.body_bytes > max_body_bytes) return over("peer sent a frame with a body of " + std::to_string(prefix.body_bytes) + " bytes, more than " + std::to_string(max_body_bytes));
  const std::size_t frame_bytes = sizeof prefix + prefix.body_bytes;
  if (in_.size() < frame_bytes) in_.resize(frame_bytes);
  if (end_ - begin_ < frame_bytes) return Step::starved;
  const std::byte* const body = in_.data() + begin_ + sizeof prefix;
  if (prefix.crc != frame_crc(prefix, body)) return over("a frame was damaged in transit");
  const Step step = reads ? take_reads(prefix, body) : take_message(prefix, body);
  if (step == Step::more) begin_ += frame_bytes;
  return step;
}

Link::Step Link::take_reads(const Prefix& prefix, const std::byte* body) {
  const bool sound = prefix.body_bytes % sizeof(ReadRequest) == 0 && prefix.body_bytes <= max_reads_per_frame * sizeof(ReadRequest);
  if (!sound || prefix.payload_bytes != 0) return over("peer sent a malformed read request");
  if (out_.waiting_bytes() >= max_replies_bytes) return paused(Pause::room);
  if (fetching_ >= max_fetching) return paused(Pause::disk);
  // Looked at when the requests are here, for each: a role that was lost before it came, or meanwhile, is not acted on.
  for (std::size_t at = 0; at < prefix.body_bytes; at += sizeof(ReadRequest)) {
    ReadRequest request;
    std::memcpy(&request, body + at, sizeof request);
    const std::shared_ptr<const ReadTable> table = context_.table.load();
    answers_.answer(request, *table, share_->rights, fence_clock_ns(), false, out_);
  }
  return Step::more;
}

bool Link::fetch(const ReadRequest& request, const std::shared_ptr<ChunkTarget>& target, std::shared_ptr<ChunkEngine::View> view, std::uint32_t length) {
  auto then = [request, fetched = later_.fetched] { fetched(request); };
  if (context_.cold != nullptr && view->file().descriptor() >= 0) context_.cold->fetch(target, std::move(view), request.offset, length, std::move(then));
  else if (!target->fetch(std::move(view), request.offset, length, std::move(then))) return false;
  ++fetching_;
  return true;
}

// Asked again from the beginning: what was allowed before may not be now.
void Link::answer_fetched(const ReadRequest& request) {
  --fetching_;
  const std::shared_ptr<const ReadTable> table = context_.table.load();
  answers_.answer(request, *table, share_->rights, fence_clock_ns(), true, out_);
}

Link::Step Link::take_message(const Prefix& prefix, const std::byte* body) {
  const auto share = share_->rights.trusted() ? BufferPool::Share::all : BufferPool::Share::half;
  const std::size_t most = std::min(max_payload_bytes, context_.pool.most_bytes(share));
  if (prefix.payload_bytes > most) return over("peer sent " + std::to_string(prefix.payload_bytes) + " bytes in one frame; this node accepts at most " + std::to_string(most));
  if (context_.events.full()) return paused(Pause::events);
  body_.assign(reinterpret_cast<const char*>(body), prefix.body_bytes);
  payload_bytes_ = prefix.payload_bytes;
  if (payload_bytes_ == 0) deliver(nullptr);
  return Step::more;
}

// Memory for the payload, or a place in the line for it.
Link::Step Link::begin_payload() {
  if (place_ != 0) return paused(Pause::memory);
  const bool trusted = share_->rights.trusted();
  payload_ = context_.pool.take(payload_bytes_, trusted ? BufferPool::Share::all : BufferPool::Share::half, later_.granted, place_);
  if (payload_) {
    limit_payload();
    return Step::more;
  }
  patience_ends_ns_.reset();
  if (trusted) patience_ends_ns_ = monotonic_ns() + memory_patience_ns;
  return paused(Pause::memory);
}

void Link::give_memory(SharedBuffer memory) {
  // Memory for what was dropped meanwhile comes too late.
  if (place_ == 0 || memory->bytes().size() != payload_bytes_) return;
  place_ = 0;
  payload_ = std::move(memory);
  limit_payload();
}

void Link::limit_payload() {
  payload_until_ns_ = monotonic_ns() + context_.stall_ns + static_cast<std::int64_t>(payload_bytes_) * ns_per_payload_byte;
}

std::optional<std::int64_t> Link::ends_ns() const {
  const std::int64_t never = INT64_MAX;
  const std::int64_t ends = std::min(payload_ ? payload_until_ns_ : never, out_.shared_pieces() > 0 ? sending_until_ns_ : never);
  return ends == never ? std::nullopt : std::optional(ends);
}

void Link::end_patience() {
  context_.pool.cancel(place_);
  place_ = 0;
  to_drop_ = std::exchange(payload_bytes_, 0);
  ++context_.counts.dropped;
}

Link::Step Link::take_payload() {
  const std::size_t n = std::min(end_ - begin_, payload_bytes_ - done_);
  if (n > 0) std::memcpy(payload_->bytes().data() + done_, in_.data() + begin_, n);
  begin_ += n;
  done_ += n;
  if (done_ < payload_bytes_) return Step::starved;
  payload_bytes_ = done_ = 0;
  deliver(std::exchange(payload_, nullptr));
  return Step::more;
}

Link::Step Link::take_dropped() {
  const std::size_t n = std::min(end_ - begin_, to_drop_);
  begin_ += n;
  to_drop_ -= n;
  return to_drop_ > 0 ? Step::starved : Step::more;
}

void Link::deliver(SharedBuffer data) {
  ++context_.counts.messages;
  context_.events.put(MessageEvent{share_->id, std::move(body_), std::move(data)});
}

// ---------------------------------------------------------------------------------------------- the socket

// One piece of what has come. False: there is none now (errno), or it is over (reason).
bool Link::receive() {
  std::byte* into = nullptr;
  std::size_t room = 0;
  if (payload_) {
    into = payload_->bytes().data() + done_;
    room = payload_bytes_ - done_;
  } else {
    if (begin_ > 0) std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
    into = in_.data() + end_;
    room = in_.size() - end_;
  }
  ssize_t n = 0;
  do n = ::recv(fd_, into, room, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n == 0) reason_ = "peer closed the connection";
  if (n < 0 && errno != EAGAIN) reason_ = std::string("cannot receive: ") + std::strerror(errno);
  if (n <= 0) return false;
  (payload_ ? done_ : end_) += static_cast<std::size_t>(n);
  return true;
}

bool Link::flush() {
  const bool idle = out_.shared_pieces() == 0 || sending_until_ns_ == 0;
  const std::uint64_t before = out_.sent_bytes();
  const bool sound = out_.flush(fd_);
  if (out_.shared_pieces() == 0) sending_until_ns_ = 0;
  else if (idle || out_.sent_bytes() > before) sending_until_ns_ = monotonic_ns() + context_.stall_ns;
  return sound;
}

bool Link::work() {
  pause_ = Pause::none;
  for (int turn = 0;;) {
    Step step = Step::more;
    while (step == Step::more) step = take();
    if (step == Step::over) return false;
    if (!flush()) {
      reason_ = std::string("cannot send: ") + std::strerror(errno);
      return false;
    }
    if (step == Step::paused) {
      if (pause_ != Pause::room || out_.waiting_bytes() >= max_replies_bytes) break;
      pause_ = Pause::none;
      continue;
    }
    if (++turn > receives_per_turn) break;
    if (!receive()) {
      if (!reason_.empty()) return false;
      break;
    }
  }
  tell_waiting();
  return true;
}

void Link::tell_waiting() {
  share_->waiting_pieces = out_.pieces();
  share_->waiting_bytes = out_.own_bytes();
}

void Link::enqueue(const std::vector<std::byte>& frame, SharedBuffer data) {
  std::memcpy(out_.room(frame.size()), frame.data(), frame.size());
  if (data) {
    const Bytes memory = data->bytes();
    out_.put(memory, std::move(data));
  }
  tell_waiting();
}

}  // namespace ff
