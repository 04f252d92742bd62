// What a rank waits in, as one on another host is told it: words of its board
// (transport/wait_board.h) whose times are those of the clock there.
#pragma once

#include "base/clock.h"
#include "base/wire.h"
#include "transport/wait_board.h"

namespace farandole {

/// What this rank shows now.
void put_waits(WireWriter& to, const WaitBoard& mine);

/// Into the board that stands for that rank here. The other's clock was read at some moment between
/// `asked` and now: what it calls standing still may be shorter by that, and its looks earlier, so
/// that nothing is taken for older or newer than it is.
void take_waits(WireReader& from, TimePoint asked, WaitBoard& theirs);

}  // namespace farandole
