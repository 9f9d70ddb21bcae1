// What a connection has yet to send: bytes of its own, memory of others, pieces of files. Used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "fireflyer/storage/engine/engine.hpp"

namespace ff {

class Outbox {
 public:
  // Memory of pieces that were sent, for the next ones: of all that one thread sends.
  struct Spares {
    static constexpr std::size_t most = 8;
    std::vector<std::vector<std::byte>> kept;
  };

  explicit Outbox(Spares& spares) : spares_(&spares) {}

  // Memory at the end, to be filled before anything else is called.
  std::byte* room(std::size_t bytes);
  void give_back(std::size_t bytes);  // the end of what `room` gave last
  void put(Bytes memory, std::shared_ptr<void> keep);  // `keep` lives until it is sent, and no longer
  // A piece of a block, which stays as it is until it is sent.
  void put(std::shared_ptr<ChunkEngine> engine, ChunkEngine::View view, std::uint64_t at, std::size_t bytes);

  bool empty() const { return pieces_.empty(); }
  std::size_t pieces() const { return pieces_.size(); }
  std::size_t own_bytes() const { return own_bytes_; }          // that nobody else accounts for
  std::size_t held_bytes() const { return own_bytes_ + pieces_.size() * piece_bytes; }  // and what the pieces themselves take
  std::size_t waiting_bytes() const { return waiting_bytes_; }  // but for shared memory

  std::size_t shared_pieces() const { return shared_pieces_; }  // memory of others that waits
  std::uint64_t sent_bytes() const { return sent_bytes_; }      // ever

  static constexpr std::size_t piece_bytes = 512;

  bool flush(int fd);  // as far as the socket takes it; false: it is broken (errno)

 private:
  struct Piece {
    std::vector<std::byte> bytes;
    Bytes shared;
    std::shared_ptr<void> keep;           // of what is shared
    std::shared_ptr<ChunkEngine> engine;  // of the view
    std::optional<ChunkEngine::View> view;
    std::uint64_t at = 0;  // in bytes, shared or the file
    std::size_t left = 0;

    bool own() const { return shared.empty() && !view; }
    const std::byte* memory() const { return (own() ? bytes.data() : shared.data()) + at; }
  };

  long send_some(int fd);
  void sent(std::size_t bytes);

  std::deque<Piece> pieces_;
  Spares* spares_;
  std::size_t own_bytes_ = 0, waiting_bytes_ = 0, shared_pieces_ = 0;
  std::uint64_t sent_bytes_ = 0;
};

}  // namespace ff
