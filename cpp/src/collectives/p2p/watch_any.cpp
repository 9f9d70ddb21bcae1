// Receives from any rank that meet no message: who could still send one?
//
// Such a receive waits for one of many, so nobody holds it up alone. Ranks that are connected are asked as for any other
// message; who has no connection has sent nothing so far. It has failed when no rank that could send does anything but
// compute, or wait for this one, for the group's timeout; for two where some cannot be asked; after ten in any case.
#include <algorithm>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/collectives/group/work.hpp"
#include "fireflyer/collectives/p2p/exchange.hpp"
#include "link.hpp"

namespace ff {
namespace {

constexpr int backstop = 10;  // timeouts

}  // namespace

void Exchange::watch_any(std::int64_t now_ns) {
  const auto waited = std::find_if(any_.begin(), any_.end(), [&](const auto& entry) { return awaited(*entry.second, now_ns); });
  if (waited == any_.end()) {
    watched_any_ = nullptr;
    return;
  }
  Flow& flow = *waited->second;
  if (watched_any_ != &flow) {
    watched_any_ = &flow;
    flow.moved_ns = now_ns;
    for (auto& [rank, peer] : peers_) peer.any_question = 0;
  }
  const std::int64_t idle_ns = now_ns - flow.moved_ns;
  const std::string call = call_text(flow), me = "rank " + std::to_string(group_.rank);
  int unknown = 0, active = 0, idle = 0, waits = 0, last_idle = -1;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    if (rank == group_.rank) continue;
    const Sender sender = ask_sender(rank, flow, now_ns);
    if (failing_) return;
    unknown += sender == Sender::unknown;
    active += sender == Sender::active;
    waits += sender == Sender::waits;
    idle += sender == Sender::idle;
    if (sender == Sender::idle) last_idle = rank;
  }
  if (unknown + active + waits + idle == 0) {
    return fail_with(FailureKind::peer_failed, -1, flow.op.seq, "all other ranks closed their communicators before " + call + " of " + me);
  }
  const bool stuck = active == 0 && idle_ns >= (unknown > 0 ? 2 : 1) * group_.timeout_ns;
  if (!stuck && idle_ns < backstop * group_.timeout_ns) return;
  if (active + unknown + idle == 0) {
    return fail_with(FailureKind::usage, -1, flow.op.seq, "the ranks wait for each other: " + me + " in " + call + ", and all others for " + me + ", or for any rank as well");
  }
  const bool one = idle == 1 && active + unknown == 0;
  fail_with(FailureKind::peer_failed, one ? last_idle : -1, flow.op.seq,
            (one ? group_.label(last_idle) + " has not called send to " : "no rank has called send to ") + me + " (" + call + ") for " + seconds(idle_ns));
}

// What is known of a rank that could send; asks it.
Exchange::Sender Exchange::ask_sender(int rank, const Flow& flow, std::int64_t now_ns) {
  const auto found = peers_.find(rank);
  if (found == peers_.end() || found->second.links.empty()) return Sender::unknown;
  Peer& peer = found->second;
  if (peer.left) return Sender::gone;
  if (peer.broken_ns != 0 && now_ns - peer.broken_ns > grace_ns) {
    fail_with(FailureKind::peer_failed, rank, flow.op.seq, group_.label(rank) + " died during " + call_text(flow) + " of rank " + std::to_string(group_.rank) + ": its connection broke");
  }
  const std::int64_t idle_ns = now_ns - flow.moved_ns;
  if (idle_ns < period_ns_) return Sender::unknown;
  const bool asked = peer.any_question != 0;
  if (asked && !peer.any_answer && now_ns - peer.any_asked_ns > group_.timeout_ns) {
    fail_with(FailureKind::peer_failed, rank, flow.op.seq, group_.label(rank) + " answered nothing for " + seconds(now_ns - peer.any_asked_ns) + " during " + call_text(flow) + " of rank " + std::to_string(group_.rank));
    return Sender::unknown;
  }
  const Sender known = peer.any_answer && asked ? judge_sender(*peer.any_answer) : Sender::active;
  const auto link = std::find_if(peer.links.begin(), peer.links.end(), [](const auto& l) { return !l->mute; });
  const bool again = !asked || (peer.any_answer && now_ns - peer.any_asked_ns >= period_ns_);
  if (!again || link == peer.links.end()) return known;
  peer.any_question = ++questions_;
  peer.any_asked_ns = now_ns;
  peer.any_answer.reset();
  const ExchangeHop hop{group_.rank, 0, flow.op.seq, flow.op.root, 0};
  OutFrame frame;
  frame.header = question_about(peer, flow, peer.any_question, false);
  frame.own.assign(reinterpret_cast<const char*>(&hop), sizeof hop);
  (*link)->push(std::move(frame));
  flush(**link);
  return known;
}

Exchange::Sender Exchange::judge_sender(const ExchangeAnswer& answer) const {
  if (answer.state == ExchangeState::idle) return answer.idle_ns >= group_.timeout_ns - period_ns_ ? Sender::idle : Sender::active;
  if (answer.state != ExchangeState::waiting) return Sender::active;
  const bool for_any = answer.waits_for < 0 && static_cast<OpKind>(answer.op_kind) == point_to_point;
  const bool in_operation = answer.waits_for < 0 && !for_any && window_.line(local_).entered.load() <= answer.op_number;
  return answer.waits_for == group_.rank || for_any || in_operation ? Sender::waits : Sender::active;
}

}  // namespace ff
