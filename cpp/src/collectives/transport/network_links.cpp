// What the flight recorder is told of a leader's connections. Whoever drives the network writes it down now and then, and once
// more when it ends: then both ends of a connection tell the same story, though one of them may be about to go.
#include "fireflyer/collectives/transport/network.hpp"

namespace ff {
namespace {

constexpr std::int64_t note_period_ns = 50'000'000;

LinkEnd with(LinkEnd end, const Backlog& backlog) {
  end.unacknowledged = backlog.unacknowledged;
  end.retransmits = backlog.retransmits;
  end.unread = backlog.unread;
  return end;
}

}  // namespace

void Network::note_links(std::int64_t now_ns) {
  links_at_ns_ = now_ns + note_period_ns;
  std::vector<LinkEnd> ends;
  for (const auto& control : controls_) {
    LinkEnd end;
    end.rank = group_.leader_of(control->node);
    end.at_ns = now_ns;
    end.sent = control->sent_bytes;
    end.sent_ns = control->sent_ns;
    end.blocked_since_ns = control->out.empty() ? 0 : control->sent_ns;
    end.received = control->received_bytes;
    end.awaiting_since_ns = control->gone || control->left ? 0 : control->heard_ns;
    end.frames_sent = control->sent_frames;
    end.frames_received = control->received_frames;
    end.broken = control->why;
    ends.push_back(with(std::move(end), tcp_backlog(control->fd)));
    for (std::size_t flow = 0; flow < control->data.size(); ++flow) {
      const DataLink& data = *control->data[flow];
      LinkEnd of;
      of.rank = group_.leader_of(data.node);
      of.channel = data.channel;
      of.socket = data.socket;
      of.at_ns = now_ns;
      of.sent = data.sent_bytes;
      of.sent_ns = data.sent_ns;
      of.blocked_since_ns = data.blocked_ns;
      of.received = data.received_bytes;
      of.awaiting_since_ns = data.wants_in ? data.moved_ns : 0;
      of.frames_sent = data.started;
      of.frames_received = data.received;
      of.frames_announced = control->started[flow];
      of.announced_ns = control->heartbeat_ns;
      of.broken = data.why;
      ends.push_back(with(std::move(of), data.transport->backlog()));
    }
  }
  const std::lock_guard lock(links_mutex_);
  links_ = std::move(ends);
}

std::vector<LinkEnd> Network::links() const {
  const std::lock_guard lock(links_mutex_);
  return links_;
}

}  // namespace ff
