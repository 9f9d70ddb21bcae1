// What a leader does for its node's network: the lanes between nodes, heartbeats, and who has died.
//
// One thread at a time drives it, the one that holds `driving_`: the leader's second thread (the network thread), or, for
// a short operation, the thread of the executor that runs the operation (NetworkDriver). The network thread gives
// `driving_` up while it sleeps, and so finds everything where another driver has left it.
//
// One connection (or several, see Plan.sockets) for each channel and neighbour, where a channel is a lane of an algorithm,
// so that neither lane can hold the other up; and one control connection for each neighbour. On a data connection frames
// come in an order that both ends know (LaneRun); a frame is only read when there is room for it, and only while the
// operation that it belongs to is the current one: the transport holds the sender back.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fireflyer/collectives/group/group.hpp"
#include "fireflyer/collectives/group/program.hpp"
#include "fireflyer/collectives/group/recorder.hpp"
#include "fireflyer/collectives/group/window.hpp"
#include "fireflyer/collectives/transport/connection.hpp"
#include "fireflyer/collectives/transport/fabric.hpp"
#include "fireflyer/collectives/transport/transport.hpp"
#include "fireflyer/collectives/transport/wire.hpp"

namespace ff {

struct Free {
  void operator()(char* p) const { std::free(p); }
};

struct DataLink {
  int channel;
  int node;
  int socket;
  std::unique_ptr<Transport> transport;
  std::string address;              // of the other end, where it is reached in several networks
  bool broken = false;              // end of stream or an error
  std::int64_t broken_ns = 0;
  std::string why;                  // it is broken, where the transport says so
  std::uint64_t sent_bytes = 0, received_bytes = 0;
  std::int64_t sent_ns = 0;         // the last time that the transport took something
  std::int64_t blocked_ns = 0;      // since when it takes nothing of a frame; 0 where it does
  std::int64_t moved_ns = 0;        // last time that something was received, or that receiving became possible
  std::uint64_t started = 0;        // frames of which at least a byte has been handed to the transport
  std::uint64_t received = 0;       // whole frames
  bool wants_in = false, wants_out = false;
  Header in_header, out_header;
  bool out_counted = false;         // in `started`
  std::size_t in_got = 0, out_sent = 0;  // bytes of header and payload so far
  std::uint32_t in_crc = 0;         // of the payload so far
  bool out_ready = false;
  std::unique_ptr<char, Free> scratch;   // frames that wait to be added
  std::size_t scratch_bytes = 0;
};

struct ControlLink {
  int node;
  int fd;
  bool left = false;                // said goodbye
  bool gone = false;                // end of stream
  std::int64_t heard_ns = 0;
  std::int64_t heartbeat_ns = 0;    // when the last heartbeat came
  std::string why;                  // it is gone
  int send_error = 0;               // errno of a send that failed because of it
  std::uint64_t sent_bytes = 0, received_bytes = 0, sent_frames = 0, received_frames = 0;
  std::int64_t sent_ns = 0;
  std::string in, out;
  OpDescriptor op;                  // of the last heartbeat
  bool in_op = false;
  std::vector<DataLink*> data;      // the connections to the same node, in an order that both ends know
  std::vector<std::uint64_t> started;  // by the last heartbeat: frames on each of them
  std::vector<std::uint64_t> entered;  // of each rank of that node: operations entered << 1 | inside one now
};

class LaneRun;

class Network {
 public:
  Network(const Group& group, const Window& window, int doorbell_fd, std::vector<std::pair<int, int>> local_fds, const std::vector<Connection>& connections,
          std::shared_ptr<Fabric> fabric = nullptr);
  ~Network();
  std::string start(const std::vector<int>& cpus);  // empty, or why its thread does not run on these
  void post(const Geometry& geometry);  // the leader has entered this operation; it begins with the next turn of a driver
  void wake();                          // the network thread, which is to drive what was posted
  bool is_short(const Geometry& geometry) const;  // and so may be driven by the thread that runs the operation
  void stop();                          // after everything posted is done; joins
  void wait_until_harmless() const;     // after a failure: until no caller's memory is read or written any more
  std::vector<PeerProgress> peer_progress() const;  // of the neighbours' ranks, by their last heartbeats
  std::vector<LinkEnd> links() const;          // of all connections; at most a heartbeat's period old
  std::uint64_t saturated() const { return saturated_.load(); }  // elements of an fp8 type clipped here so far
  std::uint64_t unrung() const { return unrung_.load(); }        // as in Stats, of the network thread

 private:
  using Lock = std::unique_lock<std::mutex>;

  void loop();
  std::optional<bool> turn();           // one round: whether anything moved; nothing when it is over
  bool take();                          // the next posted operation, if there is one; false when stopping and idle
  bool move();
  void finish();
  void let_go();
  bool sleep(Wants wants, std::int64_t until_ns, Lock* released);  // until something may move or a counter is where it is wanted; false: time is up
  bool look(std::int64_t timeout_ns, std::vector<pollfd>& entries, Lock* released);  // polls everything and reads what is not data; false: time is up
  bool has_work();
  void read_control(ControlLink& link);
  bool handle(ControlLink& link, const Header& header, const char* payload);
  bool handle_heartbeat(ControlLink& link, const Header& header, const char* payload);
  void send_control(ControlLink& link, FrameType type, const OpDescriptor& op, const std::string& payload);
  void flush(ControlLink& link);
  void send_heartbeats();
  void flood();                         // what the window says has failed, to every neighbour
  void farewell();
  void watch(std::int64_t now_ns);
  void watch_data(std::int64_t now_ns);
  void watch_remote(const ControlLink& link, std::int64_t now_ns, std::int64_t idle_ns);
  void fail(FailureKind kind, int culprit, const std::string& text);
  void fail_here(const std::exception& error);
  void fail_node(int node, const std::string& what);
  void fail_different(int node, const OpDescriptor& theirs, const OpDescriptor& ours);  // calls of two nodes, in one place
  void note_links(std::int64_t now_ns);
  std::string from(const DataLink& data) const;  // in which network, where there are several
  std::string to_here() const;          // " to rank 0 (node 0, host n17)": which end of a connection this is
  void adopt(const std::vector<Connection>& connections);
  void require(Algorithm algorithm, int lane);  // that all connections are there; throws std::invalid_argument
  DataLink* link_to(int channel, int node, int socket) const;  // nullptr where there is none
  std::string during() const;           // " during allreduce #17"

  const Group& group_;
  const Window& window_;
  int doorbell_;
  std::vector<std::pair<int, int>> locals_;
  std::shared_ptr<Fabric> fabric_;      // what carries the data; null: each connection by itself
  std::vector<std::unique_ptr<DataLink>> data_;
  std::vector<std::unique_ptr<ControlLink>> controls_;
  int sockets_ = 1;                     // for each channel and neighbour
  std::vector<TreeView> views_;         // of each lane's tree
  std::vector<std::unique_ptr<LaneRun>> lanes_;
  std::vector<pollfd> polled_, polled_asleep_;  // the second: of the network thread, while it has given up `driving_`
  std::unique_ptr<Geometry> current_;
  std::unique_ptr<Rules> rules_;
  StallDetector stall_detector_;
  std::int64_t period_ns_;              // between heartbeats
  std::int64_t stalled_ns_ = 0;         // when the timeout of the current stall ran out; 0 where none has
  std::int64_t heartbeat_at_ns_ = 0;
  std::int64_t look_at_ns_ = 0;
  std::int64_t turn_ns_ = 0;
  std::uint64_t moved_bytes_ = 0;
  std::atomic<std::uint64_t> saturated_{0}, unrung_{0};

  mutable std::mutex sightings_mutex_;
  std::map<int, PeerProgress> peer_progress_;
  std::int64_t links_at_ns_ = 0;
  mutable std::mutex links_mutex_;
  std::vector<LinkEnd> links_;

  std::mutex driving_;                  // held by the thread that drives: all of the above is its own
  std::uint64_t taken_over_ = 0;        // how often by another thread than the network thread
  std::mutex mutex_;
  std::deque<Geometry> posted_;
  bool stopping_ = false;
  std::atomic<bool> harmless_{true};
  std::thread thread_;

  friend class LaneRun;
  friend class NetworkDriver;
};

// Drives a network in the calling thread, from `take_over` to `hand_back`: then no other thread is woken for an operation.
class NetworkDriver {
 public:
  explicit NetworkDriver(Network* network) : network_(network) {}  // null: there is nothing to drive
  ~NetworkDriver() { hand_back(); }
  NetworkDriver(const NetworkDriver&) = delete;
  NetworkDriver& operator=(const NetworkDriver&) = delete;

  bool take_over();  // false where the network thread is at work: to be tried again
  bool drives() const { return lock_.owns_lock(); }
  bool turn();       // true where anything moved
  bool sleep(const Wants& wants, std::int64_t timeout_ns);  // also until one of these counters is where it is wanted; false: time is up
  void hand_back();  // what is left to do is the network thread's again

 private:
  Network* network_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace ff
