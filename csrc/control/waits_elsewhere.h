// A rank's waits as they are sent to another host: words of its board (transport/wait_board.h),
// with times of the sender's clock.
#pragma once

#include "base/clock.h"
#include "base/wire.h"
#include "transport/wait_board.h"

namespace farandole {

/// Writes this rank's board as it is now.
void put_waits(WireWriter& to, const WaitBoard& mine);

/// Writes to the copy of that rank's board here. The other's clock was read at some moment between
/// `asked` and now: it may have stood still for less time by that, and looked earlier, so that
/// nothing is taken for older or newer than it is.
void take_waits(WireReader& from, TimePoint asked, WaitBoard& theirs);

}  // namespace farandole
