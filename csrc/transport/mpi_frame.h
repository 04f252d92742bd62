// What a message of the port begins with (transport/mpi_port.h); its seal follows, and data.
#pragma once

#include "transport/mpi_port.h"

namespace farandole {

enum class MpiFrameKind : uint32_t { data, consumed, place, begun };

struct MpiFrame {
  uint64_t world = 0, stream = 0;
  int32_t lane = 0;
  MpiFrameKind kind{};
  uint64_t count = 0;  // of bytes: of data, consumed, or left of what is offered a place
  int32_t tag = 0;     // of the place
  uint32_t takes = 0;  // the place: so many of them

  // Of an all-reduce that has begun: `stream` is its communicator, `takes` how many have begun
  // there, `count` its elements, `lane` and `tag` its dtype and operation.
};

inline constexpr size_t kMpiHead = sizeof(MpiFrame) + Seals::kBytes;

/// An error of MPI's is the end of it.
template <typename Body>
void MpiPort::guard(Body body) {
  try {
    body();
  } catch (const Error& error) {
    const std::string& evidence = error.where().evidence;
    lose(error.verdict() + (evidence.empty() ? "" : " (" + evidence + ")"));
  }
}

inline Error foreign_message(int peer) {
  return {ErrorCode::link,
          "rank " + std::to_string(peer) + " sent by MPI what is no message of this transport"};
}

}  // namespace farandole
