// Transports that share one thing which moves only while it is driven: all UCX connections of a leader.
//
// It lives in a module of its own (_ucx.so) that is loaded when it is asked for, so that nothing else needs UCX.
//
// Order of calls: load_fabric; `meet` for every neighbour; `transport` for every connection; then, by the network thread
// alone, `progress` in every round of its loop and, before it sleeps on `descriptor`, `arm`. `close` ends all transports.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "fireflyer/collectives/transport/transport.hpp"

namespace ff {

class Fabric {
 public:
  static constexpr std::size_t key_bytes = 16;
  // What every message of one direction between two nodes begins with: without it a message is dropped.
  using Key = std::array<unsigned char, key_bytes>;

  virtual ~Fabric() = default;  // closes
  virtual std::string address() const = 0;  // for the neighbours' `meet`
  // Empty where it went well, otherwise why this node cannot reach that one.
  virtual std::string meet(int node, const std::string& address, const Key& outgoing, const Key& incoming) = 0;
  // Null where that node has not been met or the connection exists. What two ends send each other is a stream of bytes,
  // with one restriction: the second piece of an offer must be received by one call, into memory for all of it.
  virtual std::unique_ptr<Transport> transport(int node, int channel, int socket) = 0;
  virtual int descriptor() const = 0;
  virtual bool progress() = 0;          // true where anything happened: ask the transports again
  virtual bool arm() = 0;               // false where something happened meanwhile: make progress instead of sleeping
  // Lets go of all memory that was offered, and says nothing more; `kindly` gives what is on its way a moment. Bounded.
  virtual void close(bool kindly) = 0;
};

// Throws std::runtime_error with one line that says what is missing.
std::shared_ptr<Fabric> load_fabric(const std::string& module_path);

}  // namespace ff
