#include "lane_run.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/base/crc32c.hpp"
#include "fireflyer/collectives/kernels/kernels.hpp"

namespace ff {
namespace {

constexpr std::size_t max_scratch_frames = 8;  // of one connection
constexpr std::size_t block_align = 64;        // elements
constexpr std::size_t widened_bytes = 8192;    // of a frame whose elements are widened piece by piece: stays in the first-level cache
constexpr int burst = 2;                       // frames of one connection before the others have their turn
constexpr std::uint32_t no_checksum = ~std::uint32_t{0};

}  // namespace

Cursor::Cursor(std::vector<std::pair<std::uint32_t, std::uint32_t>> steps, int socket, int sockets)
    : steps_(std::move(steps)), socket_(static_cast<std::uint64_t>(socket)), sockets_(static_cast<std::uint64_t>(sockets)) {
  std::sort(steps_.begin(), steps_.end());
}

void Cursor::begin(std::uint64_t total, std::uint64_t depth, std::uint64_t stride) {
  count_ = steps_.empty() || total <= socket_ ? 0 : (total - socket_ - 1) / sockets_ + 1;
  low_ = 0;
  stride_ = stride;
  done_.assign((depth + sockets_ - 1) / sockets_, 0);  // of a chunk further on, all keys are higher than of chunk low_
  known_ = false;
}

const Cursor::Frame* Cursor::head() {
  if (known_) return &head_;
  if (low_ == count_) return nullptr;
  std::uint64_t best = never;
  for (std::uint64_t u = low_; u < std::min(count_, low_ + done_.size()); ++u) {
    const std::uint64_t base = chunk(u) * stride_;
    if (base + steps_[0].first > best) break;
    const std::size_t done = done_[u % done_.size()];
    if (done == steps_.size() || base + steps_[done].first >= best) continue;
    best = base + steps_[done].first;
    at_ = u;
    head_ = {chunk(u), steps_[done].second};
  }
  known_ = true;
  return &head_;
}

void Cursor::pop() {
  ++done_[at_ % done_.size()];
  while (low_ < count_ && done_[low_ % done_.size()] == steps_.size()) done_[low_++ % done_.size()] = 0;
  known_ = false;
}

LaneRun::LaneRun(Network& network, int lane) : network_(network), lane_(lane), depth_(network.window_.slots() / 2), chunks_(depth_) {}

LaneRun::~LaneRun() = default;

std::uint64_t LaneRun::number(std::uint64_t i) const { return geometry_->base + 2 * i + static_cast<std::uint64_t>(lane_); }

LaneRun::Prepared& LaneRun::prepared_for(const OpDescriptor& op) {
  const Group& group = network_.group_;
  const Algorithm algorithm = group.route(op).algorithm;
  const int channel = channel_of(algorithm, lane_);
  Orientation view;
  int which = channel;
  if (algorithm == Algorithm::double_binary_tree) {
    const TreeView& tree = network_.views_[static_cast<std::size_t>(lane_)];
    view = tree.at(op.root >= 0 ? group.node_of_rank[static_cast<std::size_t>(op.root)] : tree.root);
    which = ~(view.parent + 1);
  }
  auto& known = cache_[{static_cast<int>(op.kind), which}];
  if (known) return *known;
  if (algorithm == Algorithm::double_binary_tree) {
    if (op.kind == OpKind::reduce_scatter || op.kind == OpKind::allgather) throw std::logic_error("a tree cannot do this");
    known = prepare(tree_program(op.kind, view, lane_));
  } else {
    const auto& all = group.programs;
    const auto found = std::find_if(all.begin(), all.end(), [&](const Program& p) { return p.kind == op.kind && p.channel == channel; });
    if (found == all.end()) throw std::logic_error("an operation has no program");
    known = prepare(*found);
  }
  return *known;
}

std::unique_ptr<LaneRun::Prepared> LaneRun::prepare(Program program) {
  auto made = std::make_unique<Prepared>();
  const auto& steps = program.steps;
  made->dependents.resize(steps.size());
  made->checksum_of.assign(steps.size(), no_checksum);
  made->of_one_node = of_one_node(program);
  made->stride = stride_of(program.rounds, depth_);
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> results;
  std::map<int, std::array<std::vector<std::pair<std::uint32_t, std::uint32_t>>, 2>> of_peer;  // sends, receives
  std::map<int, std::size_t> adds;
  for (std::uint32_t s = 0; s < steps.size(); ++s) {
    const Step& step = steps[s];
    for (const std::uint32_t before : step.after) made->dependents[before].push_back(s);
    if (!sends(step.action)) ++made->not_sends;
    if (step.action == Action::send_result || step.action == Action::receive_result) {
      made->checksum_of[s] = results.try_emplace({step.block, step.span}, static_cast<std::uint32_t>(results.size())).first->second;
    }
    if (step.peer >= 0) of_peer[step.peer][receives(step.action) ? 1 : 0].push_back({step.round, s});
    if (step.action == Action::receive_add) ++adds[step.peer];
  }
  made->checksums = static_cast<std::uint32_t>(results.size());
  const int sockets = network_.sockets_;
  for (auto& [peer, both] : of_peer) {
    for (int socket = 0; socket < sockets; ++socket) {
      DataLink* link = network_.link_to(program.channel, peer, socket);
      if (!both[0].empty()) made->outlets.push_back(Outlet{link, Cursor(both[0], socket, sockets)});
      if (!both[1].empty()) made->inlets.push_back(Inlet{link, Cursor(both[1], socket, sockets), adds[peer], 0, 0, 0, 0, {}});
    }
  }
  made->program = std::move(program);
  return made;
}

void LaneRun::begin(const Geometry& geometry, const Rules& rules) {
  if (geometry.elems(geometry.base) * geometry.accum_unit > network_.window_.chunk_bytes()) throw std::logic_error("a chunk is larger than its slot");
  geometry_ = &geometry;
  rules_ = &rules;
  run_ = &prepared_for(geometry.op);
  sums_ = geometry.sums();
  parted_ = geometry.op.kind == OpKind::reduce_scatter || geometry.op.kind == OpKind::allgather;
  total_ = (geometry.chunks + 1 - static_cast<std::uint64_t>(lane_)) / 2;
  entered_ = filled_ = opened_ = done_ = freed_ = 0;
  for (Inlet& inlet : run_->inlets) {
    inlet.order.begin(total_, depth_, run_->stride);
    make_room(inlet);
  }
  for (Outlet& outlet : run_->outlets) outlet.order.begin(total_, depth_, run_->stride);
  // Operations that leave the network alone (exchanges) have chunk numbers too: their slots are free.
  const Window& window = network_.window_;
  window.advance(window.network(), static_cast<Counter>(counter_done0 + lane_), geometry.base >> 1);
  window.advance(window.network(), static_cast<Counter>(counter_freed0 + lane_), geometry.base >> 1);
  calm();
}

// Scratch memory for the largest frame of this operation that is added here, a few times.
void LaneRun::make_room(Inlet& inlet) {
  inlet.received = inlet.added = 0;
  if (inlet.adds == 0 || total_ == 0) return;
  std::size_t largest = 0;
  for (const Step& step : run_->program.steps) {
    if (step.action == Action::receive_add && step.peer == inlet.link->node) largest = std::max(largest, frame_bytes(step, range(step, 0)));
  }
  inlet.slots = std::min<std::size_t>(max_scratch_frames, inlet.adds * depth_);
  inlet.slot_bytes = (largest + 4095) / 4096 * 4096;
  inlet.waiting.resize(inlet.slots);
  DataLink& link = *inlet.link;
  const std::size_t bytes = inlet.slots * inlet.slot_bytes;
  if (link.scratch_bytes >= bytes) return;
  link.scratch.reset(static_cast<char*>(std::aligned_alloc(4096, bytes)));
  if (!link.scratch) throw std::bad_alloc();
  link.scratch_bytes = bytes;
}

LaneRun::Range LaneRun::range(const Step& step, std::uint64_t i) const {
  const std::uint64_t c = number(i);
  if (parted_) {
    const auto& first = network_.group_.layout().first;
    const std::size_t each = geometry_->part_elems(c);
    const std::size_t begin = static_cast<std::size_t>(first[step.block]) * each;
    return {begin, static_cast<std::size_t>(first[step.block + step.span]) * each - begin};
  }
  const std::size_t elems = geometry_->elems(c), blocks = run_->program.blocks;
  if (blocks == 1) return {0, elems};
  const std::size_t each = ((elems + blocks - 1) / blocks + block_align - 1) / block_align * block_align;
  const std::size_t begin = std::min(elems, step.block * each);
  return {begin, std::min(elems, (step.block + step.span) * each) - begin};
}

char* LaneRun::place(const Step& step, std::uint64_t i, const Range& where) const {
  const bool result = step.action == Action::send_result || step.action == Action::receive_result;
  return result ? rules_->result(number(i)) + where.first * geometry_->unit : rules_->sum(number(i)) + where.first * geometry_->accum_unit;
}

std::size_t LaneRun::frame_bytes(const Step& step, const Range& where) const {
  const bool result = step.action == Action::send_result || step.action == Action::receive_result;
  return where.count * (result ? geometry_->unit : geometry_->accum_unit);
}

// The contribution of this node's only rank; null where sums of the node lie in the slot.
const char* LaneRun::own(std::uint64_t i, const Range& where) const {
  return geometry_->own == nullptr ? nullptr : geometry_->own + geometry_->offset_bytes(number(i)) + where.first * geometry_->unit;
}

LaneRun::Payload LaneRun::payload(const Cursor::Frame& frame) const {
  const Step& step = run_->program.steps[frame.step];
  const Range where = range(step, frame.i);
  const char* contribution = own(frame.i, where);
  if (step.action == Action::send_acc && contribution != nullptr && run_->of_one_node[frame.step]) return {FrameType::contribution, contribution, where.count * geometry_->unit};
  return {step.action == Action::send_acc ? FrameType::partial : FrameType::result, place(step, frame.i, where), frame_bytes(step, where)};
}

void LaneRun::end() {
  const Window& window = network_.window_;
  const std::uint64_t last = geometry_->end >> 1;
  window.advance(window.network(), static_cast<Counter>(counter_done0 + lane_), last);
  window.advance(window.network(), static_cast<Counter>(counter_freed0 + lane_), last);
  calm();
}

// Frames of a later operation may lie ready; they must not wake this node before it has entered that operation.
void LaneRun::calm() {
  const std::int64_t now_ns = monotonic_ns();
  for (const auto& link : network_.data_) {
    if (link->channel % lanes != lane_) continue;
    link->wants_in = link->wants_out = false;
    link->moved_ns = now_ns;
  }
}

bool LaneRun::move() {
  open();
  bool moved = false;
  for (Inlet& inlet : run_->inlets) moved |= receive(inlet);
  for (Inlet& inlet : run_->inlets) moved |= add(inlet);
  for (Outlet& outlet : run_->outlets) moved |= send(outlet);
  publish();
  return moved;
}

// Lets chunks into the slots that are free, and opens their gates: of results where the slot may be written, of all
// other steps where the node's own contribution is in it.
void LaneRun::open() {
  const auto& steps = run_->program.steps;
  for (; entered_ < total_ && entered_ < freed_ + depth_; ++entered_) {
    Chunk& entering = chunk(entered_);
    entering.missing.resize(steps.size());
    for (std::size_t s = 0; s < steps.size(); ++s) entering.missing[s] = static_cast<std::uint32_t>(steps[s].after.size()) + 1;
    entering.left = static_cast<std::uint32_t>(steps.size());
    entering.left_not_sends = run_->not_sends;
    entering.checksums.assign(run_->checksums, 0);
  }
  if (filled_ < entered_) {
    const std::uint64_t reduced = network_.window_.value(counter_reduced);
    if (network_.window_.failed()) return;  // what was counted may be no sum: its rank could not read another
    for (; filled_ < entered_ && reduced > number(filled_); ++filled_) release(filled_, false);
  }
  while (opened_ < entered_ && (sums_ ? opened_ < filled_ : rules_->holds(rules_->needs(Stage::reduce, number(opened_))))) release(opened_++, true);
}

void LaneRun::release(std::uint64_t i, bool gate_of_results) {
  const auto& steps = run_->program.steps;
  Chunk& of = chunk(i);
  for (std::uint32_t s = 0; s < steps.size(); ++s) {
    if ((steps[s].action == Action::receive_result) != gate_of_results) continue;
    if (--of.missing[s] == 0 && steps[s].action == Action::finish) finish(i, s), complete(i, s);
  }
}

bool LaneRun::ready(const Cursor::Frame& frame) const {
  return frame.i < entered_ && chunks_[frame.i % chunks_.size()].missing[frame.step] == 0;
}

void LaneRun::complete(std::uint64_t i, std::uint32_t step) {
  const auto& steps = run_->program.steps;
  Chunk& of = chunk(i);
  --of.left;
  if (!sends(steps[step].action)) --of.left_not_sends;
  for (const std::uint32_t next : run_->dependents[step]) {
    if (--of.missing[next] == 0 && steps[next].action == Action::finish) finish(i, next), complete(i, next);
  }
}

void LaneRun::finish(std::uint64_t i, std::uint32_t index) {
  const Step& step = run_->program.steps[index];
  const Range where = range(step, i);
  const char* sum = rules_->sum(number(i)) + where.first * geometry_->accum_unit;
  char* to = rules_->result(number(i)) + where.first * geometry_->unit;
  const bool mean = geometry_->op.reduce == ReduceOp::mean;
  if (where.count == 0 || (to == sum && !mean)) return;
  const auto divisor = static_cast<std::uint32_t>(mean ? network_.group_.world_size() : 1);
  const void* contribution = own(i, where);
  const bool untouched = contribution != nullptr && run_->of_one_node[index];
  network_.saturated_ += untouched ? reduce_to(to, &contribution, 1, where.count, geometry_->op.dtype, geometry_->op.reduce, divisor)
                                   : round_from_accum(to, sum, where.count, geometry_->op.dtype, divisor);
}

bool LaneRun::receive(Inlet& inlet) {
  DataLink& link = *inlet.link;
  bool moved = false;
  for (int frames = 0; frames < burst; ++frames) {
    const Cursor::Frame* head = inlet.order.head();
    const Step* step = head ? &run_->program.steps[head->step] : nullptr;
    const bool adds = step && step->action == Action::receive_add;
    if (!step || (adds ? inlet.received - inlet.added == inlet.slots : !ready(*head))) {
      link.wants_in = false;
      return moved;
    }
    const Cursor::Frame frame = *head;
    const Range where = range(*step, frame.i);
    const std::size_t slot = adds ? inlet.received % inlet.slots : 0;
    char* to = adds ? link.scratch.get() + slot * inlet.slot_bytes : place(*step, frame.i, where);
    if (!read_frame(link, frame, to)) return moved;
    moved = true;
    inlet.order.pop();
    if (adds) {
      inlet.waiting[slot] = {frame, link.in_header.type == FrameType::contribution};
      ++inlet.received;
      add(inlet);
    } else {
      chunk(frame.i).checksums[run_->checksum_of[frame.step]] = std::uint64_t{1} << 32 | link.in_header.payload_crc;
      complete(frame.i, frame.step);
    }
  }
  return moved;
}

// Frames of one connection are added in the order in which they came; the program says which additions wait for others.
bool LaneRun::add(Inlet& inlet) {
  bool moved = false;
  while (inlet.added < inlet.received) {
    const std::size_t slot = inlet.added % inlet.slots;
    const Waiting waiting = inlet.waiting[slot];
    if (!ready(waiting.frame)) break;
    add_frame(waiting, inlet.link->scratch.get() + slot * inlet.slot_bytes);
    ++inlet.added;
    complete(waiting.frame.i, waiting.frame.step);
    moved = true;
  }
  return moved;
}

void LaneRun::add_frame(const Waiting& waiting, const char* received) {
  const auto [frame, narrow] = waiting;
  const Step& step = run_->program.steps[frame.step];
  const Range where = range(step, frame.i);
  if (where.count == 0) return;
  const OpDescriptor& op = geometry_->op;
  char* sum = place(step, frame.i, where);
  const char* contribution = run_->of_one_node[frame.step] ? own(frame.i, where) : nullptr;
  if (contribution != nullptr) {
    const std::array<const void*, 2> both{contribution, received};
    reduce_to_accum(sum, both.data(), narrow ? 2 : 1, where.count, op.dtype, op.reduce);
    if (narrow) return;
  }
  const std::size_t some = narrow ? widened_bytes / geometry_->accum_unit : where.count;
  alignas(64) char widened[widened_bytes];
  for (std::size_t at = 0; at < where.count; at += some) {
    const std::size_t count = std::min(some, where.count - at);
    std::array<const void*, 2> parts{sum + at * geometry_->accum_unit, received};
    if (narrow) {
      parts[1] = received + at * geometry_->unit;
      reduce_to_accum(widened, &parts[1], 1, count, op.dtype, op.reduce);
      parts[1] = widened;
    }
    add_accum(sum + at * geometry_->accum_unit, parts.data(), 2, count, accum_dtype(op.dtype), op.reduce);
  }
}

bool LaneRun::send(Outlet& outlet) {
  bool moved = false;
  for (int frames = 0; frames < burst; ++frames) {
    const Cursor::Frame* head = outlet.order.head();
    if (!head || !ready(*head) || !write_frame(*outlet.link, *head)) break;
    const Cursor::Frame frame = *head;
    outlet.order.pop();
    complete(frame.i, frame.step);
    moved = true;
  }
  return moved;
}

// Chunks whose results lie in the slots, and chunks that the network needs no longer: each in order.
void LaneRun::publish() {
  const Window& window = network_.window_;
  const std::uint64_t first = geometry_->base >> 1, done = done_, freed = freed_;
  while (done_ < filled_ && chunk(done_).left_not_sends == 0) ++done_;
  while (freed_ < done_ && chunk(freed_).left == 0) ++freed_;
  if (done_ > done) window.advance(window.network(), static_cast<Counter>(counter_done0 + lane_), first + done_);
  if (freed_ > freed) window.advance(window.network(), static_cast<Counter>(counter_freed0 + lane_), first + freed_);
}

bool LaneRun::want(Wants& wants) const {
  const Window& window = network_.window_;
  const auto ask = [&](int which, std::uint64_t value) { wants[static_cast<std::size_t>(which)] = std::min(wants[static_cast<std::size_t>(which)], value); };
  if (entered_ < total_ && entered_ < freed_ + depth_) return false;
  if (filled_ < entered_) ask(counter_reduced, number(filled_) + 1);
  if (sums_ || opened_ == entered_) return true;
  const Wants needs = rules_->needs(Stage::reduce, number(opened_));
  bool possible = true;
  for (int which = 0; which < counters; ++which) {
    const std::uint64_t needed = needs[static_cast<std::size_t>(which)];
    if (needed == 0 || window.value(static_cast<Counter>(which)) >= needed) continue;
    possible = false;
    if (which < counter_done0) ask(which, needed);
  }
  return !possible;
}

const DataLink* LaneRun::awaited() {
  const DataLink* link = nullptr;
  std::uint64_t oldest = never;
  for (Inlet& inlet : run_->inlets) {
    const Cursor::Frame* head = inlet.order.head();
    if (!head || !inlet.link->wants_in || head->i >= oldest) continue;
    oldest = head->i;
    link = inlet.link;
  }
  return link;
}

void LaneRun::broken(DataLink& link) {
  if (!link.broken) link.broken_ns = monotonic_ns();
  link.broken = true;
}

bool LaneRun::expected(const DataLink& link, const Cursor::Frame& frame) {
  const Header& header = link.in_header;
  if (const auto wrong = damage(header)) {
    network_.fail_node(link.node, *wrong);
    return false;
  }
  const OpDescriptor theirs = descriptor(header);
  if (theirs != geometry_->op) {
    network_.fail_different(link.node, theirs, geometry_->op);
    return false;
  }
  const Step& step = run_->program.steps[frame.step];
  const Range where = range(step, frame.i);
  const auto& first = network_.group_.layout().first;
  const auto node = static_cast<std::size_t>(link.node);
  const bool narrow = step.action == Action::receive_add && header.type == FrameType::contribution && geometry_->unit != geometry_->accum_unit &&
                      first[node + 1] - first[node] == 1;
  const FrameType type = narrow                               ? FrameType::contribution
                         : step.action == Action::receive_add ? FrameType::partial
                                                              : FrameType::result;
  const std::size_t bytes = narrow ? where.count * geometry_->unit : frame_bytes(step, where);
  if (header.type != type || header.channel != link.channel || header.chunk != number(frame.i) - geometry_->base || header.block != step.block ||
      header.span != step.span || header.bytes != bytes) {
    network_.fail_node(link.node, "sent a frame out of order");
    return false;
  }
  return true;
}

bool LaneRun::read_frame(DataLink& link, const Cursor::Frame& frame, char* to) {
  if (!link.wants_in) link.moved_ns = monotonic_ns();
  link.wants_in = true;
  if (link.broken) return false;
  for (;;) {
    const bool head = link.in_got < sizeof(Header);
    const std::size_t end = sizeof(Header) + (head ? 0 : link.in_header.bytes);  // as `expected` has found it to be
    if (!head && link.in_got == end) break;
    char* into = head ? reinterpret_cast<char*>(&link.in_header) + link.in_got : to + (link.in_got - sizeof(Header));
    const std::ptrdiff_t got = link.transport->receive_some(into, end - link.in_got);
    if (got == 0) return false;
    if (got < 0) {
      link.why = link.transport->reason();
      broken(link);
      return false;
    }
    link.in_got += static_cast<std::size_t>(got);
    link.moved_ns = monotonic_ns();
    link.received_bytes += static_cast<std::uint64_t>(got);
    network_.moved_bytes_ += static_cast<std::uint64_t>(got);
    if (!head) link.in_crc = crc32c(link.in_crc, into, static_cast<std::size_t>(got));
    if (head && link.in_got == sizeof(Header)) {
      link.in_crc = 0;
      if (!expected(link, frame)) {
        broken(link);
        return false;
      }
    }
  }
  if (link.in_crc != link.in_header.payload_crc) {
    if (network_.fabric_) network_.look(0, network_.polled_, nullptr);  // data are fetched from the sender's memory, which it takes back when it has failed and said so
    const int leader = network_.group_.leader_of(link.node);
    network_.fail(FailureKind::corruption, leader,
                  "data from " + network_.group_.label(leader) + " arrived with a wrong checksum in " + geometry_->op.name());
    broken(link);
    return false;
  }
  link.in_got = 0;
  ++link.received;
  return true;
}

void LaneRun::start_frame(DataLink& link, const Cursor::Frame& frame, const Payload& payload) {
  const Step& step = run_->program.steps[frame.step];
  Header& header = link.out_header;
  header = data_header(payload.type, geometry_->op);
  header.channel = static_cast<std::uint8_t>(link.channel);
  header.chunk = number(frame.i) - geometry_->base;
  header.block = step.block;
  header.span = step.span;
  header.bytes = static_cast<std::uint32_t>(payload.bytes);
  const std::uint32_t which = run_->checksum_of[frame.step];
  std::uint64_t* known = which == no_checksum ? nullptr : &chunk(frame.i).checksums[which];
  if (known && *known != 0) {
    header.payload_crc = static_cast<std::uint32_t>(*known);
  } else {
    header.payload_crc = crc32c(0, payload.from, payload.bytes);
    if (known) *known = std::uint64_t{1} << 32 | header.payload_crc;
  }
  seal(header);
  link.out_ready = true;
  link.out_counted = false;
  link.out_sent = 0;
}

bool LaneRun::write_frame(DataLink& link, const Cursor::Frame& frame) {
  if (link.broken) return false;
  const Payload payload = this->payload(frame);
  const std::size_t bytes = payload.bytes;
  char* from = const_cast<char*>(payload.from);  // an iovec has no const; it is read
  if (!link.out_ready) start_frame(link, frame, payload);
  while (link.out_sent < sizeof(Header) + bytes) {
    std::array<iovec, 2> pieces;
    int count = 0;
    const std::size_t payload_sent = link.out_sent < sizeof(Header) ? 0 : link.out_sent - sizeof(Header);
    if (link.out_sent < sizeof(Header)) pieces[0] = {reinterpret_cast<char*>(&link.out_header) + link.out_sent, sizeof(Header) - link.out_sent}, ++count;
    if (payload_sent < bytes) pieces[static_cast<std::size_t>(count++)] = {from + payload_sent, bytes - payload_sent};
    const std::ptrdiff_t sent = link.transport->send_some(pieces.data(), count);
    link.wants_out = sent == 0;
    if (sent == 0 && link.blocked_ns == 0) link.blocked_ns = monotonic_ns();
    if (sent < 0) link.why = link.transport->reason(), broken(link);
    if (!link.out_counted && (sent > 0 || link.transport->holds())) ++link.started, link.out_counted = true;
    if (sent <= 0) return false;
    link.out_sent += static_cast<std::size_t>(sent);
    link.sent_bytes += static_cast<std::uint64_t>(sent);
    link.sent_ns = monotonic_ns();
    link.blocked_ns = 0;
    network_.moved_bytes_ += static_cast<std::uint64_t>(sent);
  }
  link.out_ready = false;
  return true;
}

}  // namespace ff
