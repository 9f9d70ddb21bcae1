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
// Of one link; then its reads wait in the socket. One reply is always allowed.
constexpr std::size_t max_replies_bytes = std::size_t{8} << 20;                              // that wait to be sent
constexpr std::size_t max_fetching = 256, max_fetching_bytes = std::size_t{64} << 20;  // that wait for the disk
// What a link may hold before it asks the pool, as much as its receive buffer; how much it asks for; what an answer to a
// message takes.
constexpr std::size_t unshared_bytes = receive_bytes, reserve_step_bytes = std::size_t{64} << 10, answer_bytes = 512;
constexpr std::size_t unread_step_bytes = std::size_t{64} << 10;  // has to be taken in `unread_ns`
constexpr int receives_per_turn = 64;                           // then other links of the thread have theirs
constexpr std::int64_t ns_per_byte = 250;                       // 4 MB/s at least
constexpr std::int64_t memory_patience_ns = 200'000'000;

}  // namespace

Link::Link(int fd, std::shared_ptr<LinkShare> share, LinkContext context, Later later)
    : fd_(fd),
      share_(std::move(share)),
      context_(context),
      later_(std::move(later)),
      answers_(context.counts, [this](const ReadRequest& request, const auto& target, auto view, std::uint32_t length) { return fetch(request, target, std::move(view), length); }),
      out_(*context.spares),
      in_(receive_bytes) {}

Link::~Link() {
  if (place_ != 0) context_.pool.cancel(place_);
  if (reserved_bytes_ > 0) context_.pool.unreserve(reserved_bytes_, *reserved_of_);
  ::close(fd_);
}

Link::Step Link::over(std::string why) {
  reason_ = std::move(why);
  return Step::over;
}

// ---------------------------------------------------------------------------------------------- what it holds

std::size_t Link::held_bytes() const { return out_.held_bytes() + fetching_held_ + (in_.size() - receive_bytes); }

// Whether its owner may hold so much more.
bool Link::hold(std::size_t more) {
  const std::size_t needed = held_bytes() + more, covered = unshared_bytes + reserved_bytes_;
  if (needed <= covered) return true;
  if (reserved_bytes_ == 0) reserved_of_ = account();
  for (const std::size_t bytes : {std::max(needed - covered, reserve_step_bytes), needed - covered})
    if (context_.pool.reserve(bytes, *reserved_of_)) {
      reserved_bytes_ += bytes;
      return true;
    }
  ++context_.counts.held_back;
  return false;
}

void Link::give_back_what_is_free() {
  if (in_.size() > receive_bytes && begin_ == end_) {
    std::vector<std::byte>(receive_bytes).swap(in_);
    begin_ = end_ = 0;
  }
  const std::size_t held = held_bytes(), needed = held > unshared_bytes ? held - unshared_bytes : 0;
  if (reserved_bytes_ <= needed || (needed > 0 && reserved_bytes_ < needed + reserve_step_bytes)) return;
  context_.pool.unreserve(std::exchange(reserved_bytes_, needed) - needed, *reserved_of_);
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
  if (in_.size() < frame_bytes) {
    if (!share_->rights.trusted() && !hold(frame_bytes - in_.size())) return paused(Pause::share);
    in_.resize(frame_bytes);
  }
  if (end_ - begin_ < frame_bytes) return Step::starved;
  const std::byte* const body = in_.data() + begin_ + sizeof prefix;
  if (prefix.crc != frame_crc(prefix, body)) return over("a frame was damaged in transit");
  const Step step = reads ? take_reads(prefix, body) : take_message(prefix, body);
  if (step != Step::more) return step;
  begin_ += frame_bytes;
  frame_until_ns_ = 0;
  return step;
}

Link::Step Link::take_reads(const Prefix& prefix, const std::byte* body) {
  const bool sound = prefix.body_bytes % sizeof(ReadRequest) == 0 && prefix.body_bytes <= max_reads_per_frame * sizeof(ReadRequest);
  if (!sound || prefix.payload_bytes != 0) return over("peer sent a malformed read request");
  for (; next_read_ < prefix.body_bytes; next_read_ += sizeof(ReadRequest)) {
    ReadRequest request;
    std::memcpy(&request, body + next_read_, sizeof request);
    const ReadWeight weight = weight_of(request);
    if (out_.waiting_bytes() > 0 && out_.waiting_bytes() + weight.bytes > max_replies_bytes) return paused(Pause::room);
    if (fetching_ > 0 && (fetching_ >= max_fetching || fetching_bytes_ + weight.bytes > max_fetching_bytes)) return paused(Pause::disk);
    if (!hold(weight.held)) return paused(Pause::share);
    // Looked at when the request is here: a role that was lost before it came, or meanwhile, is not acted on.
    const std::shared_ptr<const ReadTable> table = context_.table.load();
    answers_.answer(request, *table, share_->rights, fence_clock_ns(), false, out_);
  }
  next_read_ = 0;
  return Step::more;
}

bool Link::fetch(const ReadRequest& request, const std::shared_ptr<ChunkTarget>& target, std::shared_ptr<ChunkEngine::View> view, std::uint32_t length) {
  auto then = [request, fetched = later_.fetched] { fetched(request); };
  if (context_.cold != nullptr && view->file().descriptor() >= 0) context_.cold->fetch(target, std::move(view), request.offset, length, std::move(then));
  else if (!target->fetch(std::move(view), request.offset, length, std::move(then))) return false;
  const ReadWeight weight = weight_of(request);
  ++fetching_;
  fetching_bytes_ += weight.bytes;
  fetching_held_ += weight.held;
  return true;
}

// Asked again from the beginning: what was allowed before may not be now.
void Link::answer_fetched(const ReadRequest& request) {
  const ReadWeight weight = weight_of(request);
  --fetching_;
  fetching_bytes_ -= weight.bytes;
  fetching_held_ -= weight.held;
  const std::shared_ptr<const ReadTable> table = context_.table.load();
  answers_.answer(request, *table, share_->rights, fence_clock_ns(), true, out_);
}

Link::Step Link::take_message(const Prefix& prefix, const std::byte* body) {
  const bool trusted = share_->rights.trusted();
  const auto share = trusted ? BufferPool::Share::all : BufferPool::Share::half;
  const std::size_t most = std::min(max_payload_bytes, context_.pool.most_bytes(share));
  if (prefix.payload_bytes > most) return over("peer sent " + std::to_string(prefix.payload_bytes) + " bytes in one frame; this node accepts at most " + std::to_string(most));
  if (!trusted && !hold(answer_bytes)) return paused(Pause::share);  // a peer's answers may be what others wait for
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
  payload_ = context_.pool.take(payload_bytes_, account(), later_.granted, place_);
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
  payload_until_ns_ = monotonic_ns() + context_.patience.stall_ns + static_cast<std::int64_t>(payload_bytes_) * ns_per_byte;
}

// From its first byte on, however the others trickle.
void Link::limit_frame(bool incomplete) {
  if (!incomplete) frame_until_ns_ = 0;
  else if (frame_until_ns_ == 0) frame_until_ns_ = monotonic_ns() + context_.patience.stall_ns + static_cast<std::int64_t>(in_.size()) * ns_per_byte;
}

std::optional<std::int64_t> Link::ends_ns() const {
  const std::int64_t never = INT64_MAX;
  std::int64_t ends = payload_ ? payload_until_ns_ : never;
  if (out_.shared_pieces() > 0) ends = std::min(ends, sending_until_ns_);
  for (const std::int64_t until : {unread_until_ns_, frame_until_ns_})
    if (until != 0) ends = std::min(ends, until);
  return ends == never ? std::nullopt : std::optional(ends);
}

std::string Link::stall_reason(std::int64_t now_ns) const {
  if (unread_until_ns_ != 0 && now_ns >= unread_until_ns_)
    return "peer has not read 64 KiB of its " + std::to_string(out_.waiting_bytes()) + " bytes of answers within " + std::to_string(context_.patience.unread_ns / 1'000'000) + " ms";
  if (frame_until_ns_ != 0 && now_ns >= frame_until_ns_) return "peer began a frame and did not go on";
  return "peer stalled while holding receive buffers of this node";
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
  else if (idle || out_.sent_bytes() > before) sending_until_ns_ = monotonic_ns() + context_.patience.stall_ns;
  limit_sending();
  return sound;
}

void Link::limit_sending() {
  if (out_.empty()) {
    unread_until_ns_ = 0;
  } else if (unread_until_ns_ == 0 || out_.sent_bytes() - unread_from_ >= unread_step_bytes) {
    unread_until_ns_ = monotonic_ns() + context_.patience.unread_ns;
    unread_from_ = out_.sent_bytes();
  }
}

bool Link::work() {
  pause_ = Pause::none;
  Step step = Step::more;
  for (int turn = 0;;) {
    step = Step::more;
    while (step == Step::more) step = take();
    if (step == Step::over) return false;
    const std::uint64_t before = out_.sent_bytes();
    if (!flush()) {
      reason_ = std::string("cannot send: ") + std::strerror(errno);
      return false;
    }
    const bool enough = ++turn > receives_per_turn;
    if (step == Step::paused) {
      const bool has_room = (pause_ == Pause::room || pause_ == Pause::share) && out_.sent_bytes() > before;
      if (!has_room || (enough && !out_.empty())) break;
      pause_ = Pause::none;
      continue;
    }
    if (enough) break;
    if (!receive()) {
      if (!reason_.empty()) return false;
      break;
    }
  }
  limit_frame(step == Step::starved && !payload_ && to_drop_ == 0 && end_ > begin_);
  give_back_what_is_free();
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
