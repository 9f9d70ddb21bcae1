// Which receive meets which message, and what becomes of messages that nobody has called for yet.
#include <algorithm>
#include <cstring>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/collectives/group/work.hpp"
#include "fireflyer/collectives/p2p/exchange.hpp"
#include "link.hpp"

namespace ff {
namespace {

constexpr std::size_t max_unexpected = credit_bytes / message_cost + 4096;

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

bool alike(const Flow& flow, const ExchangeHeader& header) {
  return header.bytes == flow.bytes && header.count == flow.op.count && header.dtype == static_cast<std::uint8_t>(flow.op.dtype);
}

// The first of a tag; of a tag that has one.
template <class Queues>
auto pop(Queues& queues, std::int32_t tag) {
  const auto found = queues.find(tag);
  const auto first = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) queues.erase(found);
  return first;
}

}  // namespace

// Of the ranks with a message of that tag that waits, the one whose turn it is; null where there is none.
Exchange::Peer* Exchange::next_sender(Tag tag) {
  const auto first = peers_.lower_bound(turn_);
  const auto search = [&](auto from, auto to) -> Peer* {
    const auto found = std::find_if(from, to, [tag](const auto& entry) { return entry.second.waiting.count(tag) != 0; });
    if (found == to) return nullptr;
    turn_ = found->first + 1;
    return &found->second;
  };
  Peer* peer = search(first, peers_.end());
  return peer ? peer : search(peers_.begin(), first);
}

// A point-to-point receive has been called.
void Exchange::match_message(Flow& flow) {
  const Tag tag = flow.op.root;
  Peer* peer = flow.from_any ? next_sender(tag) : &peers_.at(flow.rank);
  if (!peer || peer->waiting.count(tag) == 0) {
    (flow.from_any ? any_posted_ : peer->posted)[tag].push_back(&flow);
    return;
  }
  const auto found = peer->unexpected.find(Key{false, pop(peer->waiting, tag)});
  UnexpectedMessage& message = found->second;
  ExchangeLink& link = *message.link;
  const ExchangeHeader header = message.header;
  const bool offer = header.type == ExchangeFrame::offer;
  meet(link.rank, *peer, flow, link, header);
  if (!alike(flow, header)) {
    refuse(flow, link, header);
    message.dropped = true;
    if (offer) peer->unexpected.erase(found);
    else if (message.complete) end_unexpected(*peer, found->first);
    return;
  }
  message.claimed = &flow;
  if (offer) {
    peer->unexpected.erase(found);
    attach(*peer, flow, link, header);
  } else if (message.complete) {
    end_unexpected(*peer, found->first);
  }  // else its last bytes are still on their way
}

// The first receive that was called for a message of that tag from that rank; null where there is none.
Flow* Exchange::claim_receive(Peer& peer, Tag tag) {
  const auto own = peer.posted.find(tag);
  const auto any = any_posted_.find(tag);
  if (own == peer.posted.end()) return any == any_posted_.end() ? nullptr : pop(any_posted_, tag);
  const bool any_first = any != any_posted_.end() && any->second.front()->order < own->second.front()->order;
  return pop(any_first ? any_posted_ : peer.posted, tag);
}

void Exchange::meet(int rank, Peer& peer, Flow& flow, ExchangeLink& link, const ExchangeHeader& header) {
  if (flow.from_any) {
    peer.receives.insert(any_.extract(key_of(flow)));
    if (watched_any_ == &flow) watched_any_ = nullptr;
    flow.rank = rank;
    flow.entry.met(rank);
  }
  flow.met = true;
  flow.number = header.number;
  flow.link = &link;
  flow.moved_ns = monotonic_ns();
  peer.met[flow.number] = &flow;
  flow.work->met(rank);
}

bool Exchange::begin_message(ExchangeLink& link) {
  const ExchangeHeader& header = link.header;
  Peer& peer = peers_.at(link.rank);
  const Key key = key_of(descriptor(header));
  const bool offer = header.type == ExchangeFrame::offer;
  if (offer ? header.size != 0 : header.size != header.bytes) return false;
  if (!key.first && header.number != peer.arrived++) return false;
  if (!offer && (peer.used += header.bytes + message_cost) > credit_bytes) return false;
  if (key.first) return begin_part(link, peer, key);
  Flow* flow = claim_receive(peer, header.root);
  if (!flow) return keep(link, peer, key, false);
  meet(link.rank, peer, *flow, link, header);
  if (alike(*flow, header)) {
    link.into_flow = offer ? nullptr : flow;
    link.expect(flow->data);
    return true;
  }
  refuse(*flow, link, header);
  if (!offer) return keep(link, peer, key, true);
  link.expect(nullptr);
  return true;
}

// Of a group operation.
bool Exchange::begin_part(ExchangeLink& link, Peer& peer, const Key& key) {
  const ExchangeHeader& header = link.header;
  const auto found = peer.receives.find(key);
  if (found != peer.receives.end()) {
    Flow& flow = *found->second;
    if (flow.link || !fits(flow, header)) return false;
    flow.link = &link;
    link.into_flow = header.type == ExchangeFrame::offer ? nullptr : &flow;
    link.expect(flow.data);
    return true;
  }
  if (current_ && header.number <= current_->seq) {
    Flow expected;
    expected.rank = link.rank;
    expected.op = header.number == current_->seq ? *current_ : window_.signature(local_, header.number);
    const bool known = header.number + signature_ring / 2 > current_->seq;
    if (known && (header.number == current_->seq || expected.op != descriptor(header))) fits(expected, header);
    return false;
  }
  return keep(link, peer, key, false);
}

bool Exchange::keep(ExchangeLink& link, Peer& peer, const Key& key, bool dropped) {
  const ExchangeHeader& header = link.header;
  if (peer.unexpected.size() >= max_unexpected || peer.unexpected.count(key) != 0) return false;
  UnexpectedMessage& message = peer.unexpected[key];
  message.header = header;
  message.link = &link;
  message.dropped = dropped;
  if (header.type == ExchangeFrame::message) message.bytes = std::make_unique<char[]>(header.size);
  if (!key.first && !dropped) peer.waiting[header.root].push_back(header.number);
  link.expect(message.bytes.get());
  return true;
}

void Exchange::end_message(ExchangeLink& link) {
  Peer& peer = peers_.at(link.rank);
  const Key key = key_of(descriptor(link.header));
  if (Flow* flow = link.into_flow) {
    link.into_flow = nullptr;
    give_credit(peer, flow->bytes + message_cost);
    return finish(*flow);
  }
  peer.unexpected.at(key).complete = true;
  if (!key.first) return end_unexpected(peer, key);
  const auto found = peer.receives.find(key);  // called for while the last bytes were on their way
  if (found != peer.receives.end()) match_part(peer, *found->second);
}

// A message that was kept is complete: it goes to whoever has claimed it, or away.
void Exchange::end_unexpected(Peer& peer, const Key& key) {
  const auto found = peer.unexpected.find(key);
  UnexpectedMessage& message = found->second;
  Flow* flow = message.claimed;
  if (!flow && !message.dropped) return;
  if (flow && flow->bytes > 0) std::memcpy(flow->data, message.bytes.get(), flow->bytes);
  const std::uint64_t bytes = message.header.bytes;
  peer.unexpected.erase(found);
  give_credit(peer, bytes + message_cost);
  if (flow) finish(*flow);
}

// Under way to this rank: the receive of a message that has met it, or the part of a group operation.
Flow* Exchange::receive_of(Peer& peer, const ExchangeHeader& header) {
  const Key key = key_of(descriptor(header));
  if (!key.first) {
    const auto found = peer.met.find(key.second);
    return found == peer.met.end() ? nullptr : found->second;
  }
  const auto found = peer.receives.find(key);
  return found == peer.receives.end() ? nullptr : found->second.get();
}

void Exchange::match_part(Peer& peer, Flow& flow) {
  const auto found = peer.unexpected.find(key_of(flow));
  if (found == peer.unexpected.end()) return;
  UnexpectedMessage& message = found->second;
  if (!fits(flow, message.header)) return;
  flow.link = message.link;
  if (message.header.type == ExchangeFrame::offer) {
    const ExchangeHeader header = message.header;
    peer.unexpected.erase(found);
    attach(peer, flow, *flow.link, header);
  } else if (message.complete) {
    message.claimed = &flow;
    end_unexpected(peer, found->first);
  }  // else its last bytes are still on their way
}

// The offered bytes have a place now.
void Exchange::attach(Peer& peer, Flow& flow, ExchangeLink& link, const ExchangeHeader& header) {
  flow.link = &link;
  flow.moved_ns = monotonic_ns();
  if (flow.bytes > 0 && link.local && peer.readable != 0 && header.place != 0) {
    flow.address = header.place;
    pulls_.push_back(&flow);
    return;
  }
  flow.going = true;
  link.push(OutFrame{header_for(flow.bytes > 0 ? ExchangeFrame::go : ExchangeFrame::taken, flow), {}, nullptr, nullptr});
  flush(link);
  if (flow.bytes == 0) finish(flow);
}

// The message of that header is not what the receive is for. Its sender is told, if it still waits.
void Exchange::refuse(Flow& flow, ExchangeLink& link, const ExchangeHeader& header) {
  const bool offer = header.type == ExchangeFrame::offer;
  Flow sent;
  sent.rank = group_.rank;
  sent.sends = true;
  sent.op = descriptor(header);
  const std::string text = rank_text(flow.rank) + " called " + call_text(sent) + ", but " + rank_text(group_.rank) + " called " + call_text(flow) + "; size and type of a message must be equal: " +
                           (offer ? "both calls have failed" : "this call has failed, and the message is lost");
  if (offer) {
    OutFrame frame{header_for(ExchangeFrame::refused, flow), {}, nullptr, nullptr};
    frame.header.place = flow.op.seq;
    link.push(std::move(frame));
    flush(link);
  }
  finish(flow, Failure{FailureKind::mismatch, -1, flow.op.seq, text});
}

// The other rank has refused what this one offered.
void Exchange::end_refused(Flow& flow, const ExchangeHeader& header) {
  Flow receive;
  receive.rank = group_.rank;
  receive.op = descriptor(header);
  receive.op.seq = header.place;
  const std::string text = rank_text(group_.rank) + " called " + call_text(flow) + ", but " + rank_text(flow.rank) + " called " + call_text(receive) +
                           "; size and type of a message must be equal: both calls have failed";
  finish(flow, Failure{FailureKind::mismatch, -1, flow.op.seq, text});
}

// Whether a part of a group operation is what its receive is for. If not, the group ends.
bool Exchange::fits(const Flow& flow, const ExchangeHeader& header) {
  const OpDescriptor theirs = descriptor(header);
  if (theirs == flow.op && header.bytes == flow.bytes) return true;
  const std::string them = rank_text(flow.rank), me = rank_text(group_.rank);
  std::string text;
  if (theirs == flow.op) {
    text = them + " sends " + std::to_string(header.bytes) + " bytes to " + me + " in " + flow.op.name() + ", but " + me + " expects " + std::to_string(flow.bytes) +
           " from it; out_splits of one must be in_splits of the other";
  } else {
    text = them + " called " + theirs.describe() + ", but " + me + " called " + flow.op.describe() + "; all ranks must make the same calls in the same order";
  }
  fail_with(FailureKind::usage, -1, flow.op.seq, text);
  return false;
}

void Exchange::finish(Flow& flow, const Failure& failure) {
  Peer& peer = peers_.at(flow.rank);
  Flows& flows = flow.sends ? peer.sends : peer.receives;
  Flow*& watched = flow.sends ? peer.watched_send : peer.watched_receive;
  const std::shared_ptr<Work> work = flow.work;
  const std::shared_ptr<std::size_t> left = flow.left;
  if (failure.kind == FailureKind::none) moved_bytes_ += flow.bytes;
  activity_ns_ = monotonic_ns();
  flow.entry.finish(failure.kind, activity_ns_);
  if (flow.met) peer.met.erase(flow.number);
  if (watched == &flow) watched = nullptr;
  flows.erase(key_of(flow));
  if (--pending_ == 0) {
    window_.line(local_).waits.store(0);
    drained_.notify_all();
  }
  if (--*left == 0) work->finish(failure);
}

}  // namespace ff
