#include "fireflyer/collectives/transport/network.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/base/placement.hpp"
#include "lane_run.hpp"

namespace ff {
namespace {

constexpr std::int64_t ms = 1'000'000;
constexpr std::int64_t look_period_ns = 5 * ms;       // of control connections while data keep moving
constexpr std::int64_t grace_ns = 250 * ms;           // for the control connection to explain a broken data connection
constexpr std::size_t short_bytes = 4 << 20;          // what takes so little time that waking another thread would be a large part of it
constexpr int backstop = 10;                          // timeouts without any progress that nothing else explains

}  // namespace

Network::Network(const Group& group, const Window& window, int doorbell_fd, std::vector<std::pair<int, int>> local_fds, const std::vector<Connection>& connections,
                 std::shared_ptr<Fabric> fabric)
    : group_(group), window_(window), doorbell_(doorbell_fd), locals_(std::move(local_fds)), fabric_(std::move(fabric)),
      period_ns_(std::clamp<std::int64_t>(group.timeout_ns / 8, ms, 1000 * ms)) {
  adopt(connections);
  if (group.nodes() == 1) return;
  for (int lane = 0; lane < lanes; ++lane) {
    views_.emplace_back(group.trees[static_cast<std::size_t>(lane)], group.node());
    if (views_.back().neighbours.size() > 3) throw std::invalid_argument("a node has more neighbours than a binary tree allows");
    if (group.routes.empty()) require(Algorithm::double_binary_tree, lane);
    for (const Route& route : group.routes) {
      if (route.chunk_bytes > window.chunk_bytes()) throw std::invalid_argument("the chunks of a route are larger than the slots of the window");
      require(route.algorithm, lane);
    }
    lanes_.push_back(std::make_unique<LaneRun>(*this, lane));
  }
}

void Network::adopt(const std::vector<Connection>& connections) {
  for (const Connection& connection : connections) {
    const bool leads = connection.node >= 0 && connection.node < group_.nodes() && connection.node != group_.node() && connection.channel >= control_channel &&
                       connection.channel < channel_count && connection.socket >= 0 && connection.socket < max_sockets;
    if (!leads) throw std::invalid_argument("a connection leads to no neighbour of the node");
    if (connection.channel == control_channel) {
      auto link = std::make_unique<ControlLink>();
      link->node = connection.node;
      link->fd = connection.fd;
      link->heard_ns = monotonic_ns();
      link->entered.resize(group_.ranks_of(connection.node).size());
      controls_.push_back(std::move(link));
    } else {
      if (link_to(connection.channel, connection.node, connection.socket)) throw std::invalid_argument("a connection is given twice");
      auto link = std::make_unique<DataLink>();
      link->channel = connection.channel;
      link->node = connection.node;
      link->socket = connection.socket;
      link->transport = connection.fd < 0 && fabric_ ? fabric_->transport(connection.node, connection.channel, connection.socket) : tcp_transport(connection.fd);
      if (!link->transport) throw std::invalid_argument("a connection leads to a node of which UCX has no address");
      link->address = connection.fd < 0 ? "" : peer_address(connection.fd);
      sockets_ = std::max(sockets_, connection.socket + 1);
      data_.push_back(std::move(link));
    }
  }
  std::sort(data_.begin(), data_.end(), [](const auto& a, const auto& b) { return std::pair(a->channel, a->socket) < std::pair(b->channel, b->socket); });
  for (const auto& link : controls_) {
    for (const auto& data : data_) {
      if (data->node == link->node) link->data.push_back(data.get());
    }
    link->started.resize(link->data.size());
    const auto& links = link->data;
    const bool one_network = std::all_of(links.begin(), links.end(), [&](const DataLink* data) { return data->address == links.front()->address; });
    for (DataLink* data : links) data->address = one_network ? "" : data->address;
  }
}

void Network::require(Algorithm algorithm, int lane) {
  const int channel = channel_of(algorithm, lane);
  std::vector<int> peers;
  if (algorithm == Algorithm::double_binary_tree) peers = views_[static_cast<std::size_t>(lane)].neighbours;
  for (const Program& program : group_.programs) {
    for (const Step& step : program.steps) {
      if (program.channel == channel && step.peer >= 0) peers.push_back(step.peer);
    }
  }
  for (const int peer : peers) {
    bool linked = std::count_if(controls_.begin(), controls_.end(), [&](const auto& link) { return link->node == peer; }) == 1;
    for (int socket = 0; socket < sockets_; ++socket) linked = linked && link_to(channel, peer, socket);
    if (!linked) throw std::invalid_argument("a connection to node " + std::to_string(peer) + " is missing");
  }
}

DataLink* Network::link_to(int channel, int node, int socket) const {
  for (const auto& link : data_) {
    if (link->channel == channel && link->node == node && link->socket == socket) return link.get();
  }
  return nullptr;
}

Network::~Network() { stop(); }

std::string Network::start(const std::vector<int>& cpus) {
  harmless_ = false;
  thread_ = std::thread([this] { loop(); });
  return place_thread(thread_, "ff-network", cpus);
}

void Network::wait_until_harmless() const { harmless_.wait(false); }

// The transports may be reading and writing where the last operation told them to.
void Network::let_go() {
  if (fabric_) fabric_->close(!window_.failed());
  harmless_ = true;
  harmless_.notify_all();
}

bool Network::is_short(const Geometry& geometry) const { return !fabric_ && geometry.op.count * geometry.unit * geometry.parts <= short_bytes; }

void Network::post(const Geometry& geometry) {
  const std::lock_guard lock(mutex_);
  posted_.push_back(geometry);
}

void Network::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = write(doorbell_, &one, sizeof one);
}

void Network::stop() {
  if (!thread_.joinable()) return;  // by then the doorbell's number may belong to somebody else
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake();
  }
  thread_.join();
}

void Network::loop() {
  Lock lock(driving_);
  turn_ns_ = monotonic_ns();
  stall_detector_.restart(turn_ns_);
  try {
    Wants none;
    none.fill(never);
    for (bool rung = true; const auto moved = turn();) {
      if (*moved && !std::exchange(rung, true)) ++unrung_;
      if (!*moved && !window_.failed()) rung = sleep(none, heartbeat_at_ns_, &lock);
    }
  } catch (const std::exception& error) {
    fail_here(error);
  }
  note_links(monotonic_ns());
  if (window_.failed()) flood();  // first of all, so that nobody takes the ends of connections for a death
  let_go();
  farewell();
}

std::optional<bool> Network::turn() {
  if (window_.failed()) return std::nullopt;
  const std::int64_t now_ns = monotonic_ns();
  window_.line(window_.network()).heartbeat_ns.store(now_ns);
  if (now_ns - turn_ns_ > group_.timeout_ns / 2) {  // this process was stopped: others may have spoken meanwhile
    for (const auto& link : controls_) link->heard_ns = now_ns;
  }
  turn_ns_ = now_ns;
  if (fabric_) fabric_->progress();
  if (!current_ && !take()) return std::nullopt;
  bool moved = false;
  if (current_) {
    moved = move();
    finish();
  }
  if (now_ns >= look_at_ns_) {
    look_at_ns_ = now_ns + look_period_ns;
    look(0, polled_, nullptr);  // a driver that never sleeps must not take a neighbour for dead that it has not listened to
    watch(now_ns);
    if (now_ns >= links_at_ns_) note_links(now_ns);
  }
  if (now_ns >= heartbeat_at_ns_) {
    heartbeat_at_ns_ = now_ns + period_ns_;
    send_heartbeats();
  }
  return moved;
}

bool Network::take() {
  const std::lock_guard lock(mutex_);
  if (posted_.empty()) return !stopping_;
  current_ = std::make_unique<Geometry>(posted_.front());
  posted_.pop_front();
  rules_ = std::make_unique<Rules>(window_, group_, *current_);
  for (const auto& lane : lanes_) lane->begin(*current_, *rules_);
  stall_detector_.restart(monotonic_ns());
  stalled_ns_ = 0;
  return true;
}

bool Network::move() {
  bool moved = false;
  for (const auto& lane : lanes_) moved |= lane->move();
  return moved;
}

void Network::finish() {
  for (const auto& lane : lanes_) {
    if (!lane->done()) return;
  }
  for (const auto& lane : lanes_) lane->end();
  rules_.reset();
  current_.reset();
}

bool Network::has_work() {
  const std::lock_guard lock(mutex_);
  return current_ || !posted_.empty() || stopping_;
}

bool Network::sleep(Wants wants, std::int64_t until_ns, Lock* released) {
  const std::int64_t now_ns = monotonic_ns();
  if (current_) {
    for (const auto& lane : lanes_) {
      if (!lane->want(wants)) return true;
    }
    until_ns = std::min(until_ns, now_ns + std::min<std::int64_t>(50 * ms, period_ns_));
  } else if (released != nullptr && has_work()) {
    return true;
  }
  until_ns = std::min(until_ns, heartbeat_at_ns_);
  if (fabric_ && fabric_->progress() && current_) return true;
  window_.announce(window_.network(), wants);
  const bool ready = window_.met(wants) || window_.failed() || (fabric_ && !fabric_->arm());
  const bool rung = look(ready ? 0 : std::max<std::int64_t>(0, until_ns - monotonic_ns()), released != nullptr ? polled_asleep_ : polled_, released) || ready;
  window_.retract(window_.network());
  return rung;
}

bool Network::look(std::int64_t timeout_ns, std::vector<pollfd>& entries, Lock* released) {
  entries.assign(1, {doorbell_, POLLIN, 0});
  for (const auto& [rank, fd] : locals_) entries.push_back({fd, POLLIN | POLLRDHUP, 0});
  for (const auto& link : controls_) entries.push_back({link->gone ? -1 : link->fd, static_cast<short>(POLLIN | (link->out.empty() ? 0 : POLLOUT)), 0});
  for (const auto& link : data_) {
    if (!link->broken && (link->wants_in || link->wants_out)) entries.push_back(link->transport->interest(link->wants_in, link->wants_out));
  }
  if (fabric_) entries.push_back({fabric_->descriptor(), POLLIN, 0});
  const timespec limit{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  const std::uint64_t taken_over = taken_over_;
  if (released != nullptr) released->unlock();
  const int events = ppoll(entries.data(), entries.size(), &limit, nullptr);
  if (released != nullptr) released->lock();
  if (events <= 0 || taken_over != taken_over_) return events != 0;  // what was seen before another thread drove is not true any more
  if (entries[0].revents != 0) {
    std::uint64_t rings = 0;
    [[maybe_unused]] const auto got = read(doorbell_, &rings, sizeof rings);
  }
  std::vector<std::pair<int, int>> alive;
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    const auto& [rank, fd] = locals_[i];
    if ((entries[1 + i].revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0) {
      alive.push_back(locals_[i]);
    } else if (window_.line(group_.local_index(rank)).left.load() == 0) {
      fail(FailureKind::peer_failed, rank, group_.label(rank) + " died" + during() + ": its connection broke");
    }
  }
  const std::size_t first = 1 + locals_.size();
  for (std::size_t i = 0; i < controls_.size(); ++i) {
    if ((entries[first + i].revents & POLLOUT) != 0) flush(*controls_[i]);
    if ((entries[first + i].revents & ~POLLOUT) != 0) read_control(*controls_[i]);
  }
  locals_ = std::move(alive);
  return true;
}

void Network::watch(std::int64_t now_ns) {
  if (!current_ || window_.failed()) return;
  const std::int64_t idle_ns = stall_detector_.idle_ns(window_.fingerprint() + moved_bytes_, now_ns, group_.timeout_ns / 2);
  if (idle_ns < group_.timeout_ns) stalled_ns_ = 0;
  else if (stalled_ns_ == 0) stalled_ns_ = now_ns;
  if (const auto failure = local_culprit(window_, group_, current_->op, idle_ns, -1)) return fail(failure->kind, failure->culprit, failure->text);
  watch_data(now_ns);
  for (const auto& link : controls_) {
    if (!window_.failed()) watch_remote(*link, now_ns, idle_ns);
  }
  if (window_.failed() || idle_ns < backstop * group_.timeout_ns) return;
  for (const auto& lane : lanes_) {
    if (const DataLink* link = lane->awaited()) return fail_node(link->node, "sent nothing in " + current_->op.name() + " for " + seconds(idle_ns));
  }
}

void Network::watch_data(std::int64_t now_ns) {
  for (const auto& control : controls_) {
    for (std::size_t flow = 0; flow < control->data.size() && !window_.failed(); ++flow) {
      const DataLink& data = *control->data[flow];
      if (data.broken && control->left) {
        fail_node(data.node, "closed its communicator" + during());
      } else if (data.broken && now_ns - data.broken_ns > grace_ns) {
        fail_node(data.node, "broke its connection" + to_here() + from(data) + during() + (data.why.empty() ? "" : " (" + data.why + ")"));
      } else if (data.wants_in && control->started[flow] > data.received && now_ns - data.moved_ns > group_.timeout_ns) {
        fail_node(data.node, "is alive, but what it sent" + to_here() + from(data) + during() + " has not arrived for " + seconds(now_ns - data.moved_ns) + ": half-open connection");
      }
    }
  }
}

void Network::watch_remote(const ControlLink& link, std::int64_t now_ns, std::int64_t idle_ns) {
  if (link.gone) return;
  if (now_ns - link.heard_ns > group_.timeout_ns) return fail_node(link.node, "sent no heartbeat" + to_here() + " for " + seconds(now_ns - link.heard_ns) + during());
  if (link.in_op && link.op.seq == current_->op.seq && link.op != current_->op) {
    return fail_different(link.node, link.op, current_->op);
  }
  if (stalled_ns_ == 0 || link.heartbeat_ns <= stalled_ns_) return;
  const std::vector<int> ranks = group_.ranks_of(link.node);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const bool inside = (link.entered[i] & 1) != 0;
    if (!inside && link.entered[i] >> 1 <= current_->op.seq) {
      return fail(FailureKind::peer_failed, ranks[i], group_.label(ranks[i]) + " has not entered " + current_->op.name() + " for " + seconds(idle_ns));
    }
  }
}

void Network::fail_different(int node, const OpDescriptor& theirs, const OpDescriptor& ours) {
  fail(FailureKind::usage, -1,
       group_.label(group_.leader_of(node)) + " runs " + theirs.describe() + ", but " + group_.label(group_.rank) + " runs " + ours.describe() +
           "; all ranks must make the same calls in the same order");
}

std::string Network::to_here() const { return " to " + group_.label(group_.rank); }

std::string Network::from(const DataLink& data) const { return data.address.empty() ? "" : " from its address " + data.address; }

std::string Network::during() const { return current_ ? " during " + current_->op.name() : ""; }

void Network::fail(FailureKind kind, int culprit, const std::string& text) {
  window_.fail(Failure{kind, culprit, current_ ? current_->op.seq : 0, text});
}

// Memory, at worst: the others must not wait for this node.
void Network::fail_here(const std::exception& error) {
  fail(FailureKind::peer_failed, group_.rank, "the network of " + group_.label(group_.rank) + " failed: " + error.what());
}

void Network::fail_node(int node, const std::string& what) {
  const int leader = group_.leader_of(node);
  fail(FailureKind::peer_failed, leader, group_.label(leader) + " " + what);
}

}  // namespace ff
