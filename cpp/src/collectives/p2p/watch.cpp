// Who is to blame when a message does not move: questions, answers, and chains of ranks that wait for each other.
#include <poll.h>

#include <algorithm>
#include <cstring>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/collectives/group/work.hpp"
#include "fireflyer/collectives/p2p/exchange.hpp"
#include "link.hpp"

namespace ff {
namespace {

constexpr int backstop = 10;     // timeouts without any progress that nothing else explains
constexpr int max_shown_tags = 4;
constexpr int cycle_rounds = 2;  // a chain must close as often before it counts: a culprit may be found yet

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

std::string hop_text(const ExchangeHop& hop, int next) {
  const std::string number = " #" + std::to_string(hop.number);
  if (hop.call >= 2) return rank_text(hop.rank) + " in " + kind_name(static_cast<OpKind>(hop.call >> 1)) + number + " for " + rank_text(next);
  const std::string tag = " (tag " + std::to_string(hop.tag) + ")";
  return rank_text(hop.rank) + (hop.call == 1 ? " in send" + number + " to " : " in recv" + number + " from ") + rank_text(next) + tag;
}

ExchangeHop hop_of(const Flow& flow, int self) {
  const std::uint32_t call = flow.op.kind == point_to_point ? (flow.sends ? 1U : 0U) : static_cast<std::uint32_t>(flow.op.kind) << 1;
  return ExchangeHop{self, call, flow.op.seq, flow.op.kind == point_to_point ? flow.op.root : 0, 0};
}

ExchangeAnswer make_answer(ExchangeState state, const OpDescriptor& op) {
  return ExchangeAnswer{state, -1, 0, op.seq, op.count, static_cast<std::uint32_t>(op.kind), op.root, static_cast<std::uint32_t>(op.dtype), static_cast<std::uint32_t>(op.reduce)};
}

}  // namespace

void Exchange::watch(std::int64_t now_ns) {
  if (now_ns - looked_ns_ > group_.timeout_ns / 2) {  // this process was stopped: that is nobody else's fault
    for (Flows* flows : all_flows()) {
      for (auto& [key, flow] : *flows) {
        flow->moved_ns = now_ns;
        flow->unanswered_ns = 0;
        flow->serious = false;
      }
    }
  }
  looked_ns_ = now_ns;
  note_activity(now_ns);
  const Flow* waited = awaited_flow(now_ns);
  window_.line(local_).waits.store(waited && waited->op.kind == point_to_point ? 1 : 0);
  watch_leader();
  for (auto& [rank, peer] : peers_) {
    if (failing_) return;
    if (!peer.sends.empty() || !peer.receives.empty()) watch_peer(rank, peer, now_ns);
  }
  if (!failing_) watch_any(now_ns);
}

// The other ranks of a node are watched by its leader; the leader, by whoever waits.
void Exchange::watch_leader() {
  if (leader_fd_ < 0) return;
  pollfd entry{leader_fd_, POLLIN | POLLRDHUP, 0};
  if (poll(&entry, 1, 0) <= 0 || (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0 || window_.line(0).left.load() != 0) return;
  const int leader = group_.local_rank_at(0);
  fail_with(FailureKind::peer_failed, leader, 0, group_.label(leader) + " died: its connection broke");
}

// The oldest call of each direction that somebody waits for, else the oldest, and the parts of the group operation.
std::vector<Flow*> Exchange::heads(Peer& peer, std::int64_t now_ns) {
  std::vector<Flow*> found;
  for (Flows* flows : {&peer.sends, &peer.receives}) {
    const auto end = flows->lower_bound(Key{true, 0});
    const auto waited = std::find_if(flows->begin(), end, [&](const auto& entry) { return awaited(*entry.second, now_ns); });
    if (flows->begin() != end) found.push_back((waited != end ? waited : flows->begin())->second.get());
    for (auto it = flows->lower_bound(Key{true, 0}); it != flows->end(); ++it) found.push_back(it->second.get());
  }
  return found;
}

void Exchange::watch_peer(int rank, Peer& peer, std::int64_t now_ns) {
  const std::vector<Flow*> oldest = heads(peer, now_ns);
  const std::string call = oldest.front()->op.kind == point_to_point ? call_text(*oldest.front()) : oldest.front()->op.name();
  const bool gone = !peer.links.empty() && std::all_of(peer.links.begin(), peer.links.end(), [](const auto& link) { return link->broken; });
  if (gone && peer.left) return fail_with(FailureKind::peer_failed, rank, oldest.front()->op.seq, group_.label(rank) + " closed its communicator before " + call + " of rank " + std::to_string(group_.rank));
  if (peer.broken_ns != 0 && !peer.left && now_ns - peer.broken_ns > grace_ns) {
    return fail_with(FailureKind::peer_failed, rank, oldest.front()->op.seq, group_.label(rank) + " died during " + call + " of rank " + std::to_string(group_.rank) + ": its connection broke");
  }
  for (Flow* flow : oldest) {
    if (failing_) return;
    if (flow->op.kind == point_to_point) {
      Flow*& watched = flow->sends ? peer.watched_send : peer.watched_receive;
      if (watched != flow) flow->moved_ns = now_ns;  // its time counts from now on
      watched = flow;
    }
    watch_flow(peer, *flow, now_ns);
  }
}

void Exchange::watch_flow(Peer& peer, Flow& flow, std::int64_t now_ns) {
  if (!awaited(flow, now_ns)) flow.moved_ns = now_ns;
  const std::int64_t idle_ns = now_ns - flow.moved_ns;
  if (idle_ns < period_ns_) {
    flow.unanswered_ns = 0;
    flow.serious = false;
    flow.answer.reset();
    flow.cycles = 0;
    return;
  }
  const bool serious = idle_ns >= group_.timeout_ns;
  const std::string during = flow.op.kind == point_to_point ? call_text(flow) : flow.op.name();
  const auto blame = [&](const std::string& what) { fail_with(FailureKind::peer_failed, flow.rank, flow.op.seq, group_.label(flow.rank) + what + during + " of rank " + std::to_string(group_.rank)); };
  if (flow.answer && (flow.serious || flow.answer->state == ExchangeState::different)) judge(flow, idle_ns);
  if (failing_) return;
  if (serious && flow.serious && flow.unanswered_ns != 0 && now_ns - flow.unanswered_ns > period_ns_) {
    return blame(" answered nothing for " + seconds(now_ns - flow.unanswered_ns) + " during ");
  }
  if (idle_ns >= backstop * group_.timeout_ns) return blame(" made no progress for " + seconds(idle_ns) + " in ");
  if (now_ns - flow.asked_ns >= period_ns_ || (serious && !flow.serious)) ask(peer, flow, serious, now_ns);
}

// What the peer's answer to the last question means for a message that has not moved for that long.
void Exchange::judge(const Flow& flow, std::int64_t idle_ns) {
  const ExchangeAnswer& answer = *flow.answer;
  const std::string me = "rank " + std::to_string(group_.rank), them = group_.label(flow.rank);
  if (answer.state == ExchangeState::different) {
    const OpDescriptor theirs{answer.op_number, answer.op_count, static_cast<OpKind>(answer.op_kind), static_cast<DType>(answer.op_dtype), answer.op_root, static_cast<ReduceOp>(answer.op_reduce)};
    return fail_with(FailureKind::usage, -1, flow.op.seq,
                     "rank " + std::to_string(flow.rank) + " called " + theirs.describe() + ", but " + me + " called " + flow.op.describe() + "; all ranks must make the same calls in the same order");
  }
  if (answer.state == ExchangeState::waiting && answer.waits_for < 0 && static_cast<OpKind>(answer.op_kind) != point_to_point && flow.op.kind == point_to_point && window_.line(local_).entered.load() <= answer.op_number) {
    const std::string theirs = std::string(kind_name(static_cast<OpKind>(answer.op_kind))) + " #" + std::to_string(answer.op_number);
    return fail_with(FailureKind::usage, -1, flow.op.seq,
                     "the ranks wait for each other: " + hop_text(hop_of(flow, group_.rank), flow.rank) + ", rank " + std::to_string(flow.rank) + " in " + theirs + " for " + me);
  }
  const bool still = answer.idle_ns >= group_.timeout_ns - period_ns_;
  if (answer.state == ExchangeState::idle && still) {
    const std::string number = "#" + std::to_string(flow.op.seq), tag = ", tag " + std::to_string(flow.op.root);
    std::string call = " has not entered " + flow.op.name();
    if (flow.op.kind == point_to_point && flow.sends) call = " has not called recv from " + me + " (send " + number + tag + ")";
    if (flow.op.kind == point_to_point && !flow.sends) call = " has not called send to " + me + " (recv " + number + tag + ")";
    return fail_with(FailureKind::peer_failed, flow.rank, flow.op.seq, them + call + " for " + seconds(idle_ns) + other_tags(flow));
  }
  if (answer.state == ExchangeState::matching && still && idle_ns >= 2 * group_.timeout_ns) {
    fail_with(FailureKind::peer_failed, flow.rank, flow.op.seq, them + " is alive, but nothing of " + (flow.op.kind == point_to_point ? call_text(flow) : flow.op.name()) + " of " + me + " has moved for " + seconds(idle_ns) + ": half-open connection");
  }
}

// What that rank has sent instead.
std::string Exchange::other_tags(const Flow& flow) const {
  const auto found = peers_.find(flow.rank);
  if (flow.sends || flow.op.kind != point_to_point || found == peers_.end() || found->second.waiting.empty()) return "";
  std::string text = "; messages from it with other tags wait for a recv:";
  int shown = 0;
  for (const auto& [tag, numbers] : found->second.waiting) {
    if (shown++ == max_shown_tags) return text + " ...";
    text += (shown > 1 ? ", " : " ") + std::to_string(tag);
  }
  return text;
}

// Where the message of that call stands, as its question says; see wire.hpp.
std::uint64_t Exchange::position(const Peer& peer, const Flow& flow) {
  if (flow.op.kind != point_to_point) return flow.op.seq;
  return flow.sends || flow.met ? flow.number : peer.arrived;
}

ExchangeHeader Exchange::question_about(const Peer& peer, const Flow& flow, std::uint64_t question, bool serious) {
  ExchangeHeader header = make_exchange_header(ExchangeFrame::question, flow.op, question);
  header.number = position(peer, flow);
  header.place = (flow.sends ? question_asker_sends : 0) | (serious ? question_is_serious : 0);
  return header;
}

void Exchange::ask(Peer& peer, Flow& flow, bool serious, std::int64_t now_ns) {
  flow.question = ++questions_;
  flow.asked_ns = now_ns;
  if (flow.unanswered_ns == 0 || (serious && !flow.serious)) flow.unanswered_ns = now_ns;
  flow.serious = serious;
  flow.answer.reset();
  const auto link = std::find_if(peer.links.begin(), peer.links.end(), [](const auto& l) { return !l->mute; });
  if (link == peer.links.end()) return;
  const ExchangeHop hop = hop_of(flow, group_.rank);
  OutFrame frame;
  frame.header = question_about(peer, flow, flow.question, serious);
  frame.own.assign(reinterpret_cast<const char*>(&hop), sizeof hop);
  (*link)->push(std::move(frame));
  flush(**link);
}

bool Exchange::inside_operation() const {
  const Line& line = window_.line(local_);
  return line.entered.load() > line.finished.load();
}

void Exchange::note_activity(std::int64_t now_ns) {
  const Line& line = window_.line(local_);
  std::uint64_t footprint = line.entered.load() + line.finished.load();
  for (const auto& count : line.count) footprint += count.load(std::memory_order_relaxed);
  if (footprint != footprint_ || activity_ns_ == 0) activity_ns_ = now_ns;
  footprint_ = footprint;
}

// A thread of the program, the executor, or `close` waits for it.
bool Exchange::awaited(const Flow& flow, std::int64_t now_ns) const { return flow.op.kind != point_to_point || closing_ || flow.work->awaited(now_ns); }

// The one of those that has stood still for longest.
const Flow* Exchange::awaited_flow(std::int64_t now_ns) {
  const Flow* oldest = nullptr;
  const auto consider = [&](const Flow* flow) {
    if (awaited(*flow, now_ns) && (!oldest || flow->moved_ns < oldest->moved_ns)) oldest = flow;
  };
  for (auto& [rank, peer] : peers_) {
    for (const Flow* flow : heads(peer, now_ns)) consider(flow);
  }
  for (const auto& [key, flow] : any_) consider(flow.get());
  return oldest;
}

ExchangeAnswer Exchange::answer_for(const Peer& peer, const ExchangeHeader& header) {
  const std::int64_t now_ns = monotonic_ns();
  note_activity(now_ns);
  const OpDescriptor asked = descriptor(header);
  ExchangeAnswer answer = make_answer(ExchangeState::idle, OpDescriptor{});
  if (asked.kind == point_to_point) {
    if (has_made_call(peer, header)) answer.state = ExchangeState::matching;
  } else {
    const std::uint64_t entered = window_.line(local_).entered.load();
    if (entered > asked.seq) answer.state = ExchangeState::matching;
    if (entered > asked.seq && entered <= asked.seq + signature_ring / 2) {
      const OpDescriptor mine = window_.signature(local_, asked.seq);
      if (mine != asked) answer = make_answer(ExchangeState::different, mine);
    }
  }
  if (answer.state == ExchangeState::idle) {
    const Flow* flow = awaited_flow(now_ns);
    if (!flow && inside_operation()) answer = make_answer(ExchangeState::waiting, window_.signature(local_, window_.line(local_).entered.load() - 1));
    if (flow) {
      answer = make_answer(ExchangeState::waiting, flow->op);
      answer.waits_for = flow->rank;
    }
  }
  answer.idle_ns = now_ns - activity_ns_;
  return answer;
}

bool Exchange::answer_question(ExchangeLink& link) {
  const ExchangeHeader header = link.header;
  std::vector<ExchangeHop> hops(header.size / sizeof(ExchangeHop));
  std::memcpy(hops.data(), link.scratch.data(), header.size);
  for (const ExchangeHop& hop : hops) {
    if (hop.rank < 0 || hop.rank >= group_.world_size() || hop.call >> 1 >= op_kind_count) return false;
  }
  if (hops.back().rank != link.rank) return false;
  if (hops.front().rank == group_.rank) {
    close_cycle(header, hops);
    return true;
  }
  if (hops.size() == 1) {
    if (link.unread_answers >= max_unread_answers) {
      fail_with(FailureKind::peer_failed, link.rank, header.number, group_.label(link.rank) + " asks rank " + std::to_string(group_.rank) + " for its state and does not read the answers");
      return true;
    }
    OutFrame frame;
    frame.header = make_exchange_header(ExchangeFrame::answer, descriptor(header), header.bytes);
    frame.header.place = header.place;
    const ExchangeAnswer answer = answer_for(peers_.at(link.rank), header);
    frame.own.assign(reinterpret_cast<const char*>(&answer), sizeof answer);
    link.push(std::move(frame));
    flush(link);
  }
  const bool open = !has_made_call(peers_.at(link.rank), header);
  if (open && (header.place & question_is_serious) != 0 && hops.size() < max_hops) pass_on(header, std::move(hops));
  return true;
}

// Whether this rank has made the call that the peer waits for: what it asks about is on its way, or under way.
bool Exchange::has_made_call(const Peer& peer, const ExchangeHeader& header) const {
  const OpDescriptor asked = descriptor(header);
  if (asked.kind != point_to_point) return window_.line(local_).entered.load() > asked.seq;
  if ((header.place & question_asker_sends) == 0) return peer.sent > asked.seq;
  if (asked.seq < peer.arrived) {
    const auto kept = peer.unexpected.find(Key{false, asked.seq});
    return kept == peer.unexpected.end() || kept->second.claimed != nullptr;
  }
  return peer.posted.count(asked.root) != 0 || any_posted_.count(asked.root) != 0;
}

// A question goes on to whom this rank waits for itself, once to each; back at its asker it has found a cycle.
void Exchange::pass_on(const ExchangeHeader& header, std::vector<ExchangeHop> hops) {
  const std::int64_t now_ns = monotonic_ns();
  const int origin = hops.front().rank;
  hops.emplace_back();
  for (auto& [rank, peer] : peers_) {
    std::uint64_t& seen = peer.forwarded[origin];
    if (seen == header.bytes) continue;
    for (const Flow* flow : heads(peer, now_ns)) {
      if (!awaited(*flow, now_ns) || now_ns - flow->moved_ns < group_.timeout_ns / 2) continue;
      const auto link = std::find_if(peer.links.begin(), peer.links.end(), [](const auto& l) { return !l->mute; });
      if (link == peer.links.end() || (*link)->out.size() >= max_queued_frames) break;  // it will be asked again
      seen = header.bytes;
      hops.back() = hop_of(*flow, group_.rank);
      OutFrame frame;
      frame.header = question_about(peer, *flow, header.bytes, true);
      frame.own.assign(reinterpret_cast<const char*>(hops.data()), hops.size() * sizeof hops[0]);
      (*link)->push(std::move(frame));
      flush(**link);
      break;
    }
  }
}

void Exchange::close_cycle(const ExchangeHeader& header, const std::vector<ExchangeHop>& hops) {
  const std::int64_t now_ns = monotonic_ns();
  for (auto& [rank, peer] : peers_) {
    for (Flow* flow : heads(peer, now_ns)) {
      if (flow->question != header.bytes || flow->cycle_question == header.bytes || !flow->serious) continue;
      flow->cycle_question = header.bytes;
      if (++flow->cycles < cycle_rounds) return;
      std::string text = "the ranks wait for each other: ";
      for (std::size_t i = 0; i < hops.size(); ++i) text += (i == 0 ? "" : ", ") + hop_text(hops[i], hops[(i + 1) % hops.size()].rank);
      return fail_with(FailureKind::usage, -1, flow->op.seq, text + "; one of them must make its calls in another order, or with async_op");
    }
  }
}

bool Exchange::take_answer(ExchangeLink& link) {
  const ExchangeHeader& header = link.header;
  ExchangeAnswer answer;
  std::memcpy(&answer, link.scratch.data(), sizeof answer);
  const bool sane = answer.state >= ExchangeState::matching && answer.state <= ExchangeState::idle && answer.waits_for >= -1 && answer.waits_for < group_.world_size() &&
                    answer.op_kind < op_kind_count && answer.op_dtype < dtype_count && answer.op_reduce < reduce_op_count;
  if (!sane) return false;
  Peer& peer = peers_.at(link.rank);
  if (header.bytes != 0 && header.bytes == peer.any_question) {
    peer.any_answer = answer;
    return true;
  }
  const bool sends = (header.place & question_asker_sends) != 0;
  const Key key = key_of(descriptor(header));
  Flow* flow = sends ? peer.watched_send : peer.watched_receive;
  if (key.first) {
    Flows& flows = sends ? peer.sends : peer.receives;
    const auto found = flows.find(key);
    flow = found == flows.end() ? nullptr : found->second.get();
  }
  if (!flow || flow->question != header.bytes) return true;  // done meanwhile
  flow->answer = answer;
  flow->unanswered_ns = 0;
  return true;
}

}  // namespace ff
