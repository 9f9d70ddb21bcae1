#include "tree_run.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "fireflyer/crc32c.hpp"
#include "fireflyer/kernels.hpp"

namespace ff {

TreeRun::TreeRun(Network& network, int tree) : network_(network), tree_(tree), depth_(network.window_.slots() / 2) {}

DataLink* TreeRun::link_to(int node) const {
  for (const auto& link : network_.data_) {
    if (link->tree == tree_ && link->node == node) return link.get();
  }
  return nullptr;
}

char* TreeRun::buffer(std::size_t child, std::uint64_t i) {
  const std::size_t stride = network_.window_.chunk_bytes();
  auto& memory = buffers_.at(child);
  if (!memory) {
    memory.reset(static_cast<char*>(std::aligned_alloc(4096, (stride * depth_ + 4095) / 4096 * 4096)));
    if (!memory) throw std::bad_alloc();
  }
  return memory.get() + (i % depth_) * stride;
}

void TreeRun::begin(const Geometry& geometry, const Rules& rules) {
  geometry_ = &geometry;
  rules_ = &rules;
  const Group& group = network_.group_;
  const auto& parents = group.trees[static_cast<std::size_t>(tree_)];
  int root = static_cast<int>(std::find(parents.begin(), parents.end(), -1) - parents.begin());
  if (geometry.op.root >= 0) root = group.node_of_rank[static_cast<std::size_t>(geometry.op.root)];
  const Orientation view = orient(parents, root, group.node());
  up_ = geometry.sums();
  down_ = geometry.op.kind != OpKind::reduce;
  parent_ = view.parent < 0 ? nullptr : link_to(view.parent);
  children_.clear();
  for (const int node : view.children) children_.push_back(Child{link_to(node), 0, 0});
  added_ = up_ ? 0 : total();
  sent_up_ = received_down_ = done_ = freed_ = 0;
  calm();
}

bool TreeRun::done() const { return freed_ == total(); }

void TreeRun::end() {
  const Window& window = network_.window_;
  const std::uint64_t last = geometry_->end >> 1;
  window.advance(window.network(), static_cast<Counter>(counter_done0 + tree_), last);
  window.advance(window.network(), static_cast<Counter>(counter_freed0 + tree_), last);
  calm();
}

// Frames of a later operation may lie ready; they must not wake this node before it has entered that operation.
void TreeRun::calm() {
  const std::int64_t now_ns = monotonic_ns();
  for (const auto& link : network_.data_) {
    if (link->tree != tree_) continue;
    link->wants_in = link->wants_out = false;
    link->moved_ns = now_ns;
  }
}

bool TreeRun::move() {
  bool moved = false;
  moved |= receive_up();
  moved |= add();
  moved |= send_up();
  moved |= receive_down();
  moved |= send_down();
  publish();
  return moved;
}

bool TreeRun::receive_up() {
  if (!up_) return false;
  bool moved = false;
  for (std::size_t j = 0; j < children_.size(); ++j) {
    Child& child = children_[j];
    if (child.received == total() || child.received >= added_ + depth_) {
      child.link->wants_in = false;
      continue;
    }
    const std::uint64_t i = child.received;
    if (receive(*child.link, FrameType::up, i, buffer(j, i), geometry_->elems(chunk(i)) * geometry_->accum_unit)) {
      ++child.received;
      moved = true;
    }
  }
  return moved;
}

// The sum has one order, whoever arrives first: the first child, this node, the other children.
bool TreeRun::add() {
  if (!up_ || added_ == total()) return false;
  const std::uint64_t i = added_, c = chunk(i);
  for (const Child& child : children_) {
    if (child.received <= i) return false;
  }
  if (network_.window_.value(counter_reduced) <= c) return false;
  const std::size_t elems = geometry_->elems(c);
  char* own = rules_->sum(c);
  if (!children_.empty() && elems > 0) {
    std::array<const void*, 5> parts{};
    std::size_t n = 0;
    for (std::size_t j = 0; j < children_.size(); ++j) {
      parts.at(n++) = buffer(j, i);
      if (j == 0) parts.at(n++) = own;
    }
    add_accum(own, parts.data(), static_cast<int>(n), elems, accum_dtype(geometry_->op.dtype));
  }
  if (parent_ == nullptr && rules_->result(c) != own && elems > 0) round_from_accum(rules_->result(c), own, elems, geometry_->op.dtype);
  ++added_;
  return true;
}

bool TreeRun::send_up() {
  if (!up_ || parent_ == nullptr) return false;
  bool moved = false;
  while (sent_up_ < added_) {
    const std::uint64_t c = chunk(sent_up_);
    if (!send(*parent_, FrameType::up, sent_up_, rules_->sum(c), geometry_->elems(c) * geometry_->accum_unit)) break;
    ++sent_up_;
    moved = true;
  }
  return moved;
}

// May the result slot of the i-th chunk be written? In an allreduce the way up has seen to that.
bool TreeRun::room(std::uint64_t i) const {
  if (up_) return i < sent_up_;
  return rules_->holds(rules_->needs(Stage::reduce, chunk(i)));
}

bool TreeRun::receive_down() {
  if (!down_ || parent_ == nullptr) return false;
  if (received_down_ == total() || !room(received_down_)) {
    parent_->wants_in = false;
    return false;
  }
  const std::uint64_t i = received_down_, c = chunk(i);
  if (!receive(*parent_, FrameType::down, i, rules_->result(c), geometry_->elems(c) * geometry_->unit)) return false;
  ++received_down_;
  return true;
}

// Chunks whose final bits lie in the result slots of this node.
std::uint64_t TreeRun::deliverable() const {
  if (parent_ != nullptr) return received_down_;
  if (up_) return added_;
  const std::uint64_t reduced = network_.window_.value(counter_reduced);
  std::uint64_t count = done_;
  while (count < total() && reduced > chunk(count)) ++count;
  return count;
}

bool TreeRun::send_down() {
  if (!down_) return false;
  bool moved = false;
  const std::uint64_t ready = deliverable();
  for (Child& child : children_) {
    while (child.sent < ready) {
      const std::uint64_t c = chunk(child.sent);
      if (!send(*child.link, FrameType::down, child.sent, rules_->result(c), geometry_->elems(c) * geometry_->unit)) break;
      ++child.sent;
      moved = true;
    }
  }
  return moved;
}

void TreeRun::publish() {
  const Window& window = network_.window_;
  const std::uint64_t first = (geometry_->base >> 1);
  std::uint64_t now_done = down_ ? deliverable() : (parent_ != nullptr ? sent_up_ : added_);
  if (now_done > done_) {
    done_ = now_done;
    window.advance(window.network(), static_cast<Counter>(counter_done0 + tree_), first + done_);
  }
  std::uint64_t now_freed = done_;
  if (up_ && parent_ != nullptr) now_freed = std::min(now_freed, sent_up_);
  if (down_) {
    for (const Child& child : children_) now_freed = std::min(now_freed, child.sent);
  }
  if (now_freed > freed_) {
    freed_ = now_freed;
    window.advance(window.network(), static_cast<Counter>(counter_freed0 + tree_), first + freed_);
  }
}

bool TreeRun::want(Wants& wants) const {
  const auto ask = [&](Counter which, std::uint64_t value) {
    wants[static_cast<std::size_t>(which)] = std::min(wants[static_cast<std::size_t>(which)], value);
  };
  if (up_ && added_ < total()) {
    const bool arrived = std::all_of(children_.begin(), children_.end(), [&](const Child& child) { return child.received > added_; });
    if (arrived) ask(counter_reduced, chunk(added_) + 1);
  }
  if (!up_ && parent_ == nullptr && done_ < total()) ask(counter_reduced, chunk(done_) + 1);
  if (!up_ && parent_ != nullptr && received_down_ < total() && !parent_->wants_in) {
    if (room(received_down_)) return false;
    const std::uint64_t needed = rules_->needs(Stage::reduce, chunk(received_down_))[counter_out];
    if (network_.window_.value(counter_out) < needed) ask(counter_out, needed);
  }
  return true;
}

const DataLink* TreeRun::awaited() const {
  if (up_) {
    for (const Child& child : children_) {
      if (child.received <= added_ && added_ < total()) return child.link;
    }
  }
  return down_ && parent_ != nullptr && received_down_ < total() ? parent_ : nullptr;
}

void TreeRun::broken(DataLink& link) {
  if (!link.broken) link.broken_ns = monotonic_ns();
  link.broken = true;
}

bool TreeRun::check(const DataLink& link, FrameType type, std::uint64_t i, std::size_t bytes) {
  const Header& header = link.in_header;
  if (const auto wrong = damage(header)) {
    network_.fail_node(link.node, *wrong);
    return false;
  }
  const OpDescriptor theirs = descriptor(header);
  if (theirs != geometry_->op) {
    network_.fail(FailureKind::usage, -1,
                  "node " + std::to_string(link.node) + " runs " + theirs.describe() + ", but node " + std::to_string(network_.group_.node()) + " runs " +
                      geometry_->op.describe() + "; all ranks must make the same calls in the same order");
    return false;
  }
  if (header.type != type || header.tree != tree_ || header.chunk != chunk(i) - geometry_->base || header.bytes != bytes) {
    network_.fail_node(link.node, "sent a frame out of order");
    return false;
  }
  return true;
}

bool TreeRun::receive(DataLink& link, FrameType type, std::uint64_t i, char* to, std::size_t bytes) {
  if (!link.wants_in) link.moved_ns = monotonic_ns();
  link.wants_in = true;
  if (link.broken) return false;
  for (;;) {
    const bool head = link.in_got < sizeof(Header);
    char* into = head ? reinterpret_cast<char*>(&link.in_header) + link.in_got : to + (link.in_got - sizeof(Header));
    const std::size_t missing = (head ? sizeof(Header) : sizeof(Header) + bytes) - link.in_got;
    if (missing > 0) {
      const ssize_t got = recv(link.fd, into, missing, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
      if (got <= 0) {
        broken(link);
        return false;
      }
      link.in_got += static_cast<std::size_t>(got);
      link.moved_ns = monotonic_ns();
      network_.moved_bytes_ += static_cast<std::uint64_t>(got);
      if (link.in_got == sizeof(Header) && !check(link, type, i, bytes)) {
        broken(link);
        return false;
      }
      if (link.in_got < sizeof(Header) + bytes) continue;
    }
    if (link.in_got < sizeof(Header) + bytes) continue;
    if (crc32c(0, to, bytes) != link.in_header.payload_crc) {
      network_.fail(FailureKind::corruption, network_.group_.leader_of(link.node),
                    "data from " + network_.group_.label(network_.group_.leader_of(link.node)) + " arrived with a wrong checksum in " + geometry_->op.name());
      broken(link);
      return false;
    }
    link.in_got = 0;
    ++link.received;
    return true;
  }
}

bool TreeRun::send(DataLink& link, FrameType type, std::uint64_t i, const char* from, std::size_t bytes) {
  if (link.broken) return false;
  if (!link.out_ready) {
    link.out_header = make_header(type, geometry_->op, chunk(i) - geometry_->base, tree_, from, bytes);
    link.out_ready = true;
    link.out_sent = 0;
  }
  for (;;) {
    iovec parts[2];
    int count = 0;
    std::size_t payload_sent = 0;
    if (link.out_sent < sizeof(Header)) {
      parts[count++] = {reinterpret_cast<char*>(&link.out_header) + link.out_sent, sizeof(Header) - link.out_sent};
    } else {
      payload_sent = link.out_sent - sizeof(Header);
    }
    if (payload_sent < bytes) parts[count++] = {const_cast<char*>(from) + payload_sent, bytes - payload_sent};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<std::size_t>(count);
    const ssize_t sent = sendmsg(link.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      link.wants_out = errno == EAGAIN || errno == EWOULDBLOCK;
      if (!link.wants_out) broken(link);
      return false;
    }
    if (link.out_sent == 0 && sent > 0) ++link.started;
    link.out_sent += static_cast<std::size_t>(sent);
    network_.moved_bytes_ += static_cast<std::uint64_t>(sent);
    if (link.out_sent == sizeof(Header) + bytes) {
      link.out_ready = false;
      link.wants_out = false;
      return true;
    }
  }
}

}  // namespace ff
