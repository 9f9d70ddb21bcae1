// What goes over the connections: reading and writing frames, and what each of them does.
#include <algorithm>
#include <cstring>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/collectives/group/work.hpp"
#include "fireflyer/collectives/p2p/exchange.hpp"
#include "link.hpp"

namespace ff {
namespace {

constexpr std::size_t turn_bytes = 4 * segment_bytes;  // of one connection before the next one has its turn
constexpr std::size_t pull_bytes = 1024 * 1024;        // of one message that is read from its sender's memory

}  // namespace

void Exchange::greet(ExchangeLink& link) {
  if (!link.local || !reads_memory_) return;
  OutFrame frame;
  frame.header = make_exchange_header(ExchangeFrame::hello, OpDescriptor{}, 0);
  frame.header.place = reinterpret_cast<std::uintptr_t>(&token_);
  frame.own.assign(reinterpret_cast<const char*>(&token_), sizeof token_);
  link.push(std::move(frame));
}

void Exchange::read(ExchangeLink& link) {
  const auto wrong = [&](const std::string& what) { fail_with(FailureKind::peer_failed, link.rank, 0, group_.label(link.rank) + " " + what); };
  for (std::size_t bytes = 0; bytes < turn_bytes && !failing_;) {
    const auto result = link.read(bytes);
    if (result == ExchangeLink::Result::broken) {
      link.broken = link.mute = true;
      Peer& peer = peers_.at(link.rank);
      if (peer.broken_ns == 0) peer.broken_ns = monotonic_ns();
      return;
    }
    if (result == ExchangeLink::Result::blocked) return;
    if (link.in_payload && link.into_flow) link.into_flow->moved_ns = monotonic_ns();
    while (!failing_) {
      if (link.in_payload) {
        if (!link.take_payload()) break;
        if (!link.payload_is_sound()) {
          return fail_with(FailureKind::corruption, link.rank, link.header.number, "what " + group_.label(link.rank) + " sent arrived with a wrong checksum");
        }
        if (!end_frame(link) && !failing_) return wrong("sent an invalid frame");
      } else {
        if (!link.take_header()) break;
        if (const auto damaged = damage(link.header)) return wrong(*damaged);
        if (!begin_frame(link) && !failing_) return wrong("sent a frame out of order");
      }
    }
    if (link.read_was_short()) return;
  }
}

// Checks a header, and says where its payload goes.
bool Exchange::begin_frame(ExchangeLink& link) {
  const ExchangeHeader& header = link.header;
  link.into_flow = nullptr;
  switch (header.type) {
    case ExchangeFrame::message:
    case ExchangeFrame::offer: return begin_message(link);
    case ExchangeFrame::segment: return begin_segment(link);
    case ExchangeFrame::hello:
      if (header.size != sizeof token_ || !link.local) return false;
      break;
    case ExchangeFrame::question:
      if (header.size < sizeof(ExchangeHop) || header.size % sizeof(ExchangeHop) != 0) return false;
      break;
    case ExchangeFrame::answer:
      if (header.size != sizeof(ExchangeAnswer)) return false;
      break;
    default:
      if (header.size != 0) return false;
  }
  link.expect(link.scratch.data());
  return true;
}

bool Exchange::begin_segment(ExchangeLink& link) {
  const ExchangeHeader& header = link.header;
  Peer& peer = peers_.at(link.rank);
  Flow* receive = receive_of(peer, header);
  if (!receive) return false;
  Flow& flow = *receive;
  if (flow.link != &link || !flow.going || header.place != flow.moved || header.size == 0 || header.size > flow.bytes - flow.moved) return false;
  link.into_flow = &flow;
  link.expect(flow.data + flow.moved);
  return true;
}

bool Exchange::end_frame(ExchangeLink& link) {
  const ExchangeHeader& header = link.header;
  Peer& peer = peers_.at(link.rank);
  const Key key = key_of(descriptor(header));
  switch (header.type) {
    case ExchangeFrame::hello: {
      std::uint64_t there = 0;
      auto process = Process::met(link.pid);
      const bool same = reads_memory_ && link.pid > 0 && read_memory(link.pid, &there, header.place, sizeof there) == 0 && std::memcmp(&there, link.scratch.data(), sizeof there) == 0;
      if (!same) return true;
      peer.readable = link.pid;
      peer.process = std::move(process);
      return true;
    }
    case ExchangeFrame::message: end_message(link); return true;
    case ExchangeFrame::offer: return end_of_offer(link);
    case ExchangeFrame::segment: {
      Flow& flow = *link.into_flow;
      link.into_flow = nullptr;
      flow.moved += header.size;
      if (flow.moved == flow.bytes) finish(flow);
      return true;
    }
    case ExchangeFrame::go:
    case ExchangeFrame::taken:
    case ExchangeFrame::refused: {
      const auto found = peer.sends.find(key);
      if (found == peer.sends.end()) return false;
      Flow& flow = *found->second;
      if (flow.link != &link || !flow.offered || flow.going) return false;
      if (header.type == ExchangeFrame::refused) {
        if (key.first) return false;
        end_refused(flow, header);
        return true;
      }
      if (header.type == ExchangeFrame::taken) {
        finish(flow);
        return true;
      }
      if (flow.bytes == 0 || header.place > flow.bytes) return false;
      flow.moved = header.place;
      flow.moved_ns = monotonic_ns();
      flow.going = true;
      link.streams.push_back(&flow);
      flush(link);
      return true;
    }
    case ExchangeFrame::credit:
      if (header.place > credit_bytes - peer.credit) return false;
      peer.credit += header.place;
      return true;
    case ExchangeFrame::question: return answer_question(link);
    case ExchangeFrame::answer: return take_answer(link);
    case ExchangeFrame::goodbye: peer.left = true; return true;
  }
  return false;
}

bool Exchange::end_of_offer(ExchangeLink& link) {
  Peer& peer = peers_.at(link.rank);
  if (Flow* flow = receive_of(peer, link.header)) attach(peer, *flow, link, link.header);
  return true;
}

void Exchange::flush(ExchangeLink& link) {
  for (std::size_t bytes = 0; bytes < turn_bytes && !failing_ && !link.mute;) {
    if (link.out.empty() && !next_segment(link)) return;
    const std::size_t before = bytes;
    const auto result = link.write(bytes);
    OutFrame& frame = link.out.front();
    Flow* flow = frame.flow;
    if (flow && bytes > before) flow->moved_ns = monotonic_ns();
    if (result != ExchangeLink::Result::moved) return;
    const bool last = flow && (frame.header.type == ExchangeFrame::message || frame.header.place + frame.header.size == flow->bytes);
    if (frame.header.type == ExchangeFrame::answer) --link.unread_answers;
    link.out.pop_front();
    if (last) finish(*flow);
  }
}

bool Exchange::next_segment(ExchangeLink& link) {
  if (link.streams.empty()) return false;
  Flow& flow = *link.streams.front();
  OutFrame frame;
  frame.header = header_for(ExchangeFrame::segment, flow);
  frame.header.place = flow.moved;
  frame.header.size = static_cast<std::uint32_t>(std::min<std::uint64_t>(segment_bytes, flow.bytes - flow.moved));
  frame.data = flow.data + flow.moved;
  frame.flow = &flow;
  flow.moved += frame.header.size;
  link.streams.pop_front();
  if (flow.moved < flow.bytes) link.streams.push_back(&flow);  // several messages of a pair share its connection
  link.push(std::move(frame));
  return true;
}

// The next piece of the message whose turn it is, from its sender's memory.
void Exchange::pull() {
  if (pulls_.empty() || failing_) return;
  Flow& flow = *pulls_.front();
  pulls_.pop_front();
  Peer& peer = peers_.at(flow.rank);
  const std::size_t piece = std::min<std::uint64_t>(pull_bytes, flow.bytes - flow.moved);
  ExchangeHeader header = header_for(ExchangeFrame::taken, flow);
  bool read = read_memory(peer.readable, flow.data + flow.moved, flow.address + flow.moved, piece) == 0;
  if (read && flow.moved + piece == flow.bytes && peer.process->ended()) {  // it may not have been the sender's memory
    read = false;
    flow.moved = 0;
  }
  if (!read) {
    peer.readable = 0;  // not permitted, after all; or the process has ended, which its connection will say
    header = header_for(ExchangeFrame::go, flow);
    header.place = flow.moved;
    flow.going = true;
  } else {
    if (window_.failed()) {  // its sender may have got its array back, and have changed it
      failing_ = true;
      return;
    }
    flow.moved += piece;
    flow.moved_ns = monotonic_ns();
    if (flow.moved < flow.bytes) return pulls_.push_back(&flow);
  }
  ExchangeLink& link = *flow.link;
  link.push(OutFrame{header, {}, nullptr, nullptr});
  flush(link);
  if (!flow.going) finish(flow);
}

}  // namespace ff
