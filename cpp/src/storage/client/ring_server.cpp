#include "ring_server.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fireflyer/storage/wire/stream.hpp"

namespace ff {
namespace {

constexpr std::size_t first_buffer_bytes = std::size_t{128} << 10;
constexpr std::uint32_t generation_mask = 0x7fffffff;  // numbers of reads are below 2^63: above is for who numbers them otherwise

}  // namespace

// ---------------------------------------------------------------------------------------------- slots

std::uint64_t ReadSlots::open(ReadSlot slot) {
  if (free_.empty()) {
    free_.push_back(static_cast<std::uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  const std::uint32_t index = free_.back();
  free_.pop_back();
  slot.generation = slots_[index].generation;
  slots_[index] = std::move(slot);
  return number_of(index, slots_[index].generation);
}

ReadSlot* ReadSlots::find(std::uint64_t number) {
  const auto index = static_cast<std::uint32_t>(number);
  if (index >= slots_.size()) return nullptr;
  ReadSlot& slot = slots_[index];
  return slot.used && slot.generation == number >> 32 ? &slot : nullptr;
}

void ReadSlots::close(std::uint64_t number) {
  ReadSlot& slot = *find(number);
  slot.used = false;
  slot.into = {};
  slot.keep.reset();
  slot.generation = (slot.generation + 1) & generation_mask;
  free_.push_back(static_cast<std::uint32_t>(number));
}

std::vector<std::uint64_t> ReadSlots::of_server(int server) const {
  std::vector<std::uint64_t> numbers;
  for (std::uint32_t index = 0; index < slots_.size(); ++index)
    if (slots_[index].used && slots_[index].server == server) numbers.push_back(number_of(index, slots_[index].generation));
  return numbers;
}

// ---------------------------------------------------------------------------------------------- sending

RingServer::~RingServer() {
  if (fd_ >= 0) ::close(fd_);
}

void RingServer::prepare(std::uint64_t number, const ReadRequest& request) {
  ++reads_;
  if (broken()) return complete(number, {});
  prepared_.emplace_back(request).tag = number;
}

void RingServer::prepare(const std::string& body, Bytes data, ChunkRing::Keep keep) {
  if (broken()) return;
  ++unanswered_;
  const auto frame = message_frame(body, data.size());
  std::memcpy(out_.room(frame.size()), frame.data(), frame.size());
  out_.put(data, std::move(keep));
}

void RingServer::frame_prepared() {
  for (std::size_t from = 0; from < prepared_.size(); from += max_reads_per_frame) {
    const std::size_t count = std::min(max_reads_per_frame, prepared_.size() - from);
    Prefix prefix;
    prefix.kind = FrameKind::reads;
    prefix.body_bytes = static_cast<std::uint32_t>(count * sizeof(ReadRequest));
    prefix.crc = frame_crc(prefix, &prepared_[from]);
    std::byte* const at = out_.room(sizeof prefix + prefix.body_bytes);
    std::memcpy(at, &prefix, sizeof prefix);
    std::memcpy(at + sizeof prefix, &prepared_[from], prefix.body_bytes);
  }
  prepared_.clear();
}

void RingServer::send() {
  if (!broken() && !out_.flush(fd_)) fail(std::string("cannot send: ") + std::strerror(errno));
}

// ---------------------------------------------------------------------------------------------- ends

void RingServer::complete(std::uint64_t number, Completion completion) {
  ReadSlot& slot = *slots_.find(number);
  completion.tag = slot.request.tag;
  completion.batched = slot.batched;
  if (!slot.cancelled) {
    events_.emplace_back(completion);
    --reads_;
  }
  slots_.close(number);
}

void RingServer::cancel(std::uint64_t number) {
  ReadSlot& slot = *slots_.find(number);
  --reads_;
  slot.cancelled = true;
  slot.into = {};
  slot.keep.reset();
  if (!arriving_ || arriving_->reply.tag != number) return;
  to_drop_ = arriving_->length - arriving_->done;
  arriving_.reset();
  slots_.close(number);
}

void RingServer::fail(const std::string& why) {
  if (broken()) return;
  ::close(std::exchange(fd_, -1));
  arriving_.reset();
  message_.reset();
  out_ = Outbox(spares_);
  in_ = {};
  prepared_.clear();
  unanswered_ = 0;
  for (const std::uint64_t number : slots_.of_server(number_)) complete(number, {});
  events_.emplace_back(LostServer{number_, why});
}

// ---------------------------------------------------------------------------------------------- receiving

// False: more is needed, or the connection failed.
bool RingServer::take() {
  if (to_drop_ > 0) {
    const std::size_t n = std::min(end_ - begin_, to_drop_);
    begin_ += n;
    to_drop_ -= n;
    return to_drop_ == 0;
  }
  if (arriving_) return take_data(*arriving_);
  if (!message_) return take_header();
  const std::size_t n = std::min(end_ - begin_, message_bytes_ - message_->data.size());
  message_->data.append(reinterpret_cast<const char*>(in_.data() + begin_), n);
  begin_ += n;
  if (message_->data.size() < message_bytes_) return false;
  if (unanswered_ > 0) --unanswered_;
  events_.emplace_back(std::move(*message_));
  message_.reset();
  return true;
}

bool RingServer::take_header() {
  if (end_ - begin_ < sizeof(Prefix)) return false;
  Prefix prefix;
  std::memcpy(&prefix, in_.data() + begin_, sizeof prefix);
  const bool known = prefix.kind == FrameKind::read_reply || prefix.kind == FrameKind::message;
  if (prefix.magic != chunk_wire_magic || !known || prefix.body_bytes > max_body_bytes || prefix.payload_bytes > max_payload_bytes)
    return fail("the node sent an invalid reply"), false;
  const std::size_t frame_bytes = sizeof prefix + prefix.body_bytes;
  if (in_.size() < frame_bytes) in_.resize(frame_bytes);
  if (end_ - begin_ < frame_bytes) return false;
  const std::byte* const body = in_.data() + begin_ + sizeof prefix;
  if (prefix.crc != frame_crc(prefix, body)) return fail("a reply was damaged in transit"), false;
  begin_ += frame_bytes;
  return prefix.kind == FrameKind::message ? take_message(prefix, body) : take_reply(prefix, body);
}

bool RingServer::take_message(const Prefix& prefix, const std::byte* body) {
  ReceivedMessage message{number_, {reinterpret_cast<const char*>(body), prefix.body_bytes}, {}};
  message_bytes_ = prefix.payload_bytes;
  message_ = std::move(message);
  return true;
}

bool RingServer::take_reply(const Prefix& prefix, const std::byte* body) {
  if (prefix.body_bytes < sizeof(ReadReply)) return fail("the node sent an invalid reply"), false;
  Arriving a;
  a.checksums.swap(spare_);
  std::memcpy(&a.reply, body, sizeof a.reply);
  a.length = prefix.payload_bytes;
  ReadSlot* const slot = slots_.find(a.reply.tag);
  if (slot == nullptr || slot->server != number_ || a.length > slot->request.length) return fail("the node answered a request that was not sent"), false;
  const std::size_t pieces = pieces_of(slot->request.offset, a.length);
  if (prefix.body_bytes != sizeof a.reply + pieces * sizeof(std::uint32_t)) return fail("a reply has the wrong number of checksums"), false;
  if (slot->cancelled) {
    slots_.close(a.reply.tag);
    to_drop_ = a.length;
    return true;
  }
  a.checksums.resize(pieces);
  if (pieces > 0) std::memcpy(a.checksums.data(), body + sizeof a.reply, pieces * sizeof(std::uint32_t));
  arriving_ = std::move(a);
  return true;
}

bool RingServer::take_data(Arriving& a) {
  ReadSlot& slot = *slots_.find(a.reply.tag);
  if (const std::size_t n = std::min<std::size_t>(end_ - begin_, a.length - a.done); n > 0) {
    std::memcpy(slot.into.data() + a.done, in_.data() + begin_, n);
    begin_ += n;
    a.done += n;
  }
  check_pieces(a, slot);
  if (a.done < a.length) return false;
  finish(a);
  return true;
}

// Verifies what is complete, while it is still in the cache.
void RingServer::check_pieces(Arriving& a, const ReadSlot& slot) {
  while (a.piece < a.checksums.size()) {
    const std::size_t n = std::min<std::size_t>(granule_bytes - (slot.request.offset + a.checked) % granule_bytes, a.length - a.checked);
    if (a.checked + n > a.done) return;
    const std::uint32_t crc = crc32c(0, slot.into.data() + a.checked, n);
    a.sound = a.sound && crc == a.checksums[a.piece];
    a.crc = crc32c_joined(a.crc, crc, n);
    a.checked += n;
    ++a.piece;
  }
}

void RingServer::finish(Arriving& a) {
  Completion completion;
  completion.status = a.sound ? a.reply.status : ReadStatus::damaged;
  completion.bytes = a.sound ? a.length : 0;
  completion.crc = a.sound ? a.crc : 0;
  completion.content = {a.reply.made_in, a.reply.version};
  completion.chunk_length = a.reply.chunk_length, completion.chain_version = a.reply.chain_version, completion.where = a.reply.where;
  complete(a.reply.tag, completion);
  spare_.swap(a.checksums);
  arriving_.reset();
}

// False: there is nothing now, or the connection failed.
bool RingServer::receive_some() {
  std::byte* into = nullptr;
  std::size_t room = 0;
  if (arriving_) {  // the buffer is empty: the rest goes to where it belongs
    into = slots_.find(arriving_->reply.tag)->into.data() + arriving_->done;
    room = arriving_->length - arriving_->done;
  } else {
    if (in_.empty()) in_.resize(first_buffer_bytes);
    if (begin_ > 0) std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
    into = in_.data() + end_;
    room = in_.size() - end_;
  }
  ssize_t n = 0;
  do n = ::recv(fd_, into, room, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EAGAIN) return false;
  if (n <= 0) return fail(n == 0 ? "the node closed the connection" : std::string("cannot receive: ") + std::strerror(errno)), false;
  (arriving_ ? arriving_->done : end_) += static_cast<std::size_t>(n);
  return true;
}

void RingServer::receive() {
  while (!broken()) {
    while (take()) {
    }
    if (broken() || !receive_some()) return;
  }
}

}  // namespace ff
