// The control connections between leaders: heartbeats, aborts and goodbyes, sent and heard.
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/base/crc32c.hpp"
#include "fireflyer/collectives/transport/network.hpp"

namespace ff {
namespace {

constexpr std::int64_t farewell_ns = 200'000'000;  // for last words to be delivered
constexpr std::size_t max_control_backlog = 64 * 1024;

}  // namespace

void Network::read_control(ControlLink& link) {
  char buffer[4096];
  for (;;) {
    const ssize_t got = recv(link.fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      link.gone = true;
      const int error = got < 0 ? errno : link.send_error;
      link.why = error == 0 ? "closed by the other end" : std::strerror(error);
      if (!link.left && !window_.failed()) fail_node(link.node, "died, or was cut off" + during() + ": its connection" + to_here() + " broke (" + link.why + ")");
      return;
    }
    link.heard_ns = monotonic_ns();
    link.received_bytes += static_cast<std::uint64_t>(got);
    link.in.append(buffer, static_cast<std::size_t>(got));
    while (link.in.size() >= sizeof(Header)) {
      Header header;
      std::memcpy(&header, link.in.data(), sizeof header);
      auto wrong = damage(header);
      if (!wrong && header.bytes > max_control_payload) wrong = "sent a control frame that is too long";
      if (!wrong && link.in.size() < sizeof header + header.bytes) break;
      if (!wrong && crc32c(0, link.in.data() + sizeof header, header.bytes) != header.payload_crc) wrong = "sent a control frame with a wrong checksum";
      if (!wrong && !handle(link, header, link.in.data() + sizeof header)) wrong = "sent an invalid control frame";
      if (wrong) {
        link.gone = true;
        link.why = *wrong;
        fail_node(link.node, *wrong);
        return;
      }
      link.in.erase(0, sizeof header + header.bytes);
      ++link.received_frames;
    }
  }
}

bool Network::handle(ControlLink& link, const Header& header, const char* payload) {
  switch (header.type) {
    case FrameType::heartbeat: return handle_heartbeat(link, header, payload);
    case FrameType::goodbye: {
      link.left = true;
      const std::lock_guard lock(sightings_mutex_);
      for (const int rank : group_.ranks_of(link.node)) peer_progress_[rank].left = true, peer_progress_[rank].rank = rank;
      return true;
    }
    case FrameType::abort: {
      const bool sane = header.kind >= 1 && header.kind <= 4 && header.root >= -1 && header.root < group_.world_size() && header.bytes <= max_failure_text;
      if (!sane) return false;
      std::string text(payload, header.bytes);
      std::replace_if(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
      const auto kind = static_cast<FailureKind>(header.kind);
      const bool names_none = header.root < 0 && (kind == FailureKind::peer_failed || kind == FailureKind::corruption);
      if (names_none && text.find("(reported by ") == std::string::npos) text += " (reported by " + group_.label(group_.leader_of(link.node)) + ")";
      window_.fail(Failure{kind, header.root, header.seq, text});
      return true;
    }
    default: return false;
  }
}

bool Network::handle_heartbeat(ControlLink& link, const Header& header, const char* payload) {
  const std::size_t flows = link.started.size();
  std::vector<std::uint64_t> words(1 + flows + link.entered.size());
  if (header.bytes != words.size() * sizeof(std::uint64_t)) return false;
  std::memcpy(words.data(), payload, header.bytes);
  link.in_op = words[0] != 0;
  std::copy_n(words.begin() + 1, flows, link.started.begin());
  std::copy(words.begin() + 1 + static_cast<std::ptrdiff_t>(flows), words.end(), link.entered.begin());
  link.op = descriptor(header);
  link.heartbeat_ns = link.heard_ns;
  const std::vector<int> ranks = group_.ranks_of(link.node);
  const std::lock_guard lock(sightings_mutex_);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::uint64_t entered = link.entered[i] >> 1;
    peer_progress_[ranks[i]] = {ranks[i], entered, entered - ((link.entered[i] & 1) != 0 && entered > 0 ? 1 : 0), false, link.heartbeat_ns};
  }
  return true;
}

std::vector<PeerProgress> Network::peer_progress() const {
  const std::lock_guard lock(sightings_mutex_);
  std::vector<PeerProgress> all;
  for (const auto& [rank, progress] : peer_progress_) all.push_back(progress);
  return all;
}

void Network::send_control(ControlLink& link, FrameType type, const OpDescriptor& op, const std::string& payload) {
  if (link.gone || (type == FrameType::heartbeat && !link.out.empty())) return;
  if (link.out.size() > max_control_backlog) return;
  const Header header = control_header(type, op, payload.data(), payload.size());
  link.out.append(reinterpret_cast<const char*>(&header), sizeof header);
  link.out += payload;
  ++link.sent_frames;
  flush(link);
}

void Network::flush(ControlLink& link) {
  while (!link.out.empty()) {
    const ssize_t sent = send(link.fd, link.out.data(), link.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      link.out.clear();  // reading will find the end, but no reason any more: the system tells it once
      if (errno != EPIPE) link.send_error = errno;
    }
    if (sent <= 0) return;
    link.sent_bytes += static_cast<std::uint64_t>(sent);
    link.sent_ns = monotonic_ns();
    link.out.erase(0, static_cast<std::size_t>(sent));
  }
}

void Network::send_heartbeats() {
  for (const auto& link : controls_) {
    std::vector<std::uint64_t> words{current_ ? 1ULL : 0ULL};
    for (const DataLink* data : link->data) words.push_back(data->started);
    for (int local = 0; local < window_.ranks(); ++local) {
      const Line& line = window_.line(local);
      const std::uint64_t finished = line.finished.load(), entered = line.entered.load();
      words.push_back(entered << 1 | (entered > finished || line.waits.load() != 0 ? 1U : 0U));
    }
    const std::string payload(reinterpret_cast<const char*>(words.data()), words.size() * sizeof words[0]);
    send_control(*link, FrameType::heartbeat, current_ ? current_->op : OpDescriptor{}, payload);
  }
}

void Network::flood() {
  const Failure failure = window_.failure();
  OpDescriptor op;
  op.seq = failure.seq;
  op.kind = static_cast<OpKind>(failure.kind);
  op.root = failure.culprit < group_.world_size() ? failure.culprit : -1;  // others take this node for broken where it names no rank
  for (const auto& link : controls_) send_control(*link, FrameType::abort, op, failure.text);
}

// Last words are lost where a connection is closed over data that nobody read; so they are seen out first.
void Network::farewell() {
  if (!window_.failed()) {
    for (const auto& link : controls_) send_control(*link, FrameType::goodbye, OpDescriptor{}, "");
  }
  const std::int64_t until_ns = monotonic_ns() + farewell_ns;
  for (const auto& link : controls_) {
    flush(*link);
    shutdown(link->fd, SHUT_WR);
  }
  for (;;) {
    bool delivered = true;
    for (const auto& link : controls_) {
      int waiting = 0;
      if (!link->gone && ioctl(link->fd, SIOCOUTQ, &waiting) == 0 && waiting > 1) delivered = false;
      char buffer[4096];
      while (recv(link->fd, buffer, sizeof buffer, MSG_DONTWAIT) > 0) {
      }
    }
    if (delivered || monotonic_ns() > until_ns) return;
    poll(nullptr, 0, 1);
  }
}

}  // namespace ff
